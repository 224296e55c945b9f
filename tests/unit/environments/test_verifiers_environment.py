"""The verifiers adapter: a process of another interpreter, what it says, and what becomes of its faults.

A stand-in for the library, of which the adapter needs few names; ``tests/verifiers`` has the real one.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.core.types import Task
from wingbeat.environments import make_environment
from wingbeat.resources import ResourceFailed, Resources

pytest.importorskip("openai")

STAND_IN = """
import os
from types import SimpleNamespace


class Environment:
    def __init__(self, with_eval):
        rows = [{"example_id": n, "prompt": f"row {n}", "answer": str(n)} for n in range(6)]
        self.train, self.eval = (rows[2:], rows[:3]) if with_eval else (rows, None)

    def build_dataset(self):
        return self.train

    def build_eval_dataset(self):
        return self.eval

    async def run_rollout(self, row, client, model, sampling):
        print("printed by an environment", row["example_id"])
        what = row["answer"]
        if what == "3":
            return {"reward": 0.0, "error": {"message": "the tool broke"}}
        if what == "4":
            raise RuntimeError("a bug")
        if what == "5":
            os._exit(7)
        return {"reward": float(what) / 4 + sampling.get("max_tokens", 0), "metrics": {}}


def load_environment(name, with_eval=True):
    if name != "rows":
        raise ValueError(f"could not import {name}")
    return Environment(with_eval)
"""
CLIENTS = "class OpenAIChatCompletionsClient:\n    def __init__(self, calls):\n        self.calls = calls\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    library = tmp_path / "verifiers"
    library.mkdir()
    (library / "__init__.py").write_text(STAND_IN)
    (library / "clients.py").write_text(CLIENTS)
    return tmp_path


class Episode:
    base_url = "http://127.0.0.1:9/v1"
    api_key = "key"
    model = "solver"

    def __init__(self, task: Task, pool: Resources) -> None:
        self.task = task
        self._pool = pool

    def lease(self, spec: Any, *, name: str = "") -> AbstractAsyncContextManager[Any]:
        return self._pool.lease(spec, name=name, owner=self.task.id)


def options_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"python": sys.executable, "folder": str(folder), **more}


def test_rows_are_tasks_and_none_is_in_both_splits(folder: Path) -> None:
    made = make_environment("verifiers:rows", options_of(folder, eval_size=2))
    assert [task.payload["row"]["answer"] for task in made.tasks("eval")] == ["0", "1"]
    assert [task.payload["row"]["answer"] for task in made.tasks("train")] == ["2", "3", "4", "5"]
    shared = make_environment("verifiers:rows", options_of(folder))
    assert [task.payload["row"]["answer"] for task in shared.tasks("train")] == ["3", "4", "5"]
    cut = make_environment("verifiers:rows", options_of(folder, arguments={"with_eval": False}, eval_size=2, size=3))
    assert [task.payload["row"]["answer"] for task in cut.tasks("eval")] == ["4", "5"]
    assert [task.payload["row"]["answer"] for task in cut.tasks("train")] == ["0", "1", "2"]
    assert [made.score(made.tasks("eval")[1], answer) for answer in (" 1\n", "0", "")] == [1.0, 0.0, 0.0]


@pytest.mark.slow
async def test_episodes_run_in_one_process_and_its_faults_are_no_rewards(folder: Path) -> None:
    options = options_of(folder, arguments={"with_eval": False}, eval_size=1, max_tokens=1)
    made: Any = make_environment("verifiers:rows", options)
    async with Resources() as pool:
        tasks = [*made.tasks("train"), *made.tasks("eval")]
        plays = [made.play(Episode(task, pool)) for task in tasks[:5]]
        rewards = await asyncio.gather(*plays, return_exceptions=True)
        assert rewards[:3] == [1.0, 1.25, 1.5]
        assert all(isinstance(fault, ResourceFailed) for fault in rewards[3:])
        assert "the tool broke" in str(rewards[3]) and "RuntimeError: a bug" in str(rewards[4])
        with pytest.raises(ResourceFailed, match="has ended"):
            await made.play(Episode(tasks[5], pool))
        assert await made.play(Episode(tasks[1], pool)) == 1.25  # in a new process


def test_what_does_not_load_is_refused_with_its_last_words(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not import nothing"):
        make_environment("verifiers:nothing", options_of(folder))
    with pytest.raises(ConfigError, match="no interpreter /nowhere/python"):
        make_environment("verifiers:rows", {"python": "/nowhere/python"})
    with pytest.raises(ConfigError, match="got verifiers alone"):
        make_environment("verifiers")
    (tmp_path / "other").mkdir()
    with pytest.raises(DependencyMissing, match=r"verifiers==0\.2\.1"):
        make_environment("verifiers:rows", options_of(tmp_path / "other"))
    (folder / "verifiers" / "__init__.py").write_text("__version__ = '0.4.0'\n")
    with pytest.raises(ConfigError, match=r"verifiers 0\.4\.0 has no load_environment"):
        make_environment("verifiers:rows", options_of(folder, arguments={"with_eval": True}))
