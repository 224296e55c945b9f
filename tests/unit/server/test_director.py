"""The course of a run where its sources come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.core.types import Split
from wingbeat.server.director import Director, DirectorParts
from wingbeat.server.policies.host import TrainerState
from wingbeat.server.signals import Changed


async def exported(path: Path) -> Any:
    return SimpleNamespace(path=str(path))


async def test_a_run_whose_last_eval_source_is_removed_after_a_restart_ends(tmp_path: Path) -> None:
    """Its last step is taken, and its trainer has yet to tell of its weights."""
    changed, left = Changed(), {Split.EVAL: 1, Split.TRAIN: 1}
    host = SimpleNamespace(
        name="solver",
        config=SimpleNamespace(trainable=True),
        complete=True,
        halted="",
        version=1,
        newest=1,
        state=TrainerState.READY,
        manifest_of=lambda version: None,
        export=exported,
    )
    parts: Any = DirectorParts(
        config=Config.model_validate(
            {"policies": {"solver": {"model": "m"}}, "run": {"steps": 1}, "eval": {"at_start": False}}
        ),
        run_dir=tmp_path,
        policies={"solver": host},  # pyright: ignore[reportArgumentType]
        dealer=SimpleNamespace(num_tasks=left.__getitem__),  # pyright: ignore[reportArgumentType]
        book=SimpleNamespace(),  # pyright: ignore[reportArgumentType]
        evaluations=SimpleNamespace(running=False),  # pyright: ignore[reportArgumentType]
        events=EventLog(None),
        changed=changed,
        summary=dict,
    )
    director = Director(parts)
    run = asyncio.create_task(director.run())
    await asyncio.sleep(0)
    assert not director.complete, "it waits for the evaluation that it may still make"
    left[Split.EVAL] = 0
    changed.notify()
    await asyncio.wait_for(run, 10)
    assert director.complete
