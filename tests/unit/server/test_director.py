"""The course of a run where its sources come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.core.signals import Changed
from wingbeat.core.types import Split
from wingbeat.server.director import Director, DirectorParts
from wingbeat.server.policies.host import TrainerState


async def exported(path: Path) -> Any:
    return SimpleNamespace(path=str(path))


def director_of(
    folder: Path, changed: Changed, left: dict[Split, int], *, at_start: bool = False, **host: Any
) -> Director:
    """Of a run with one policy, which has taken its last step."""
    solver = SimpleNamespace(
        **{
            "name": "solver",
            "config": SimpleNamespace(trainable=True),
            "complete": True,
            "halted": "",
            "version": 1,
            "newest": 1,
            "state": TrainerState.READY,
            "manifest_of": lambda version: None,
            "export": exported,
            "trainer": SimpleNamespace(is_cut_off=False),
            **host,
        }
    )
    parts: Any = DirectorParts(
        config=Config.model_validate(
            {"policies": {"solver": {"model": "m"}}, "run": {"steps": 1}, "eval": {"at_start": at_start}}
        ),
        run_dir=folder,
        policies={"solver": solver},  # pyright: ignore[reportArgumentType]
        dealer=SimpleNamespace(num_tasks=left.__getitem__, missing=()),  # pyright: ignore[reportArgumentType]
        book=SimpleNamespace(),  # pyright: ignore[reportArgumentType]
        evaluations=SimpleNamespace(running=False),  # pyright: ignore[reportArgumentType]
        events=EventLog(None),
        changed=changed,
        summary=dict,
    )
    return Director(parts)


async def test_a_run_whose_last_eval_source_is_removed_after_a_restart_ends(tmp_path: Path) -> None:
    """Its last step is taken, and its trainer has yet to tell of its weights."""
    changed, left = Changed(), {Split.EVAL: 1, Split.TRAIN: 1}
    director = director_of(tmp_path, changed, left)
    run = asyncio.create_task(director.run())
    await asyncio.sleep(0)
    assert not director.complete, "it waits for the evaluation that it may still make"
    left[Split.EVAL] = 0
    changed.notify()
    await asyncio.wait_for(run, 10)
    assert director.complete


async def test_a_run_whose_weights_reach_nobody_waits_for_no_evaluation(tmp_path: Path) -> None:
    left = {Split.EVAL: 1, Split.TRAIN: 1}
    cut_off = {"trainer": SimpleNamespace(is_cut_off=True), "halted": "refused", "version": 0, "newest": 0}
    director = director_of(tmp_path, Changed(), left, at_start=True, **cut_off)
    await asyncio.wait_for(director.run(), 10)
    assert director.complete
