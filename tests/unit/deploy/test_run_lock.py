"""A run has one supervisor: a second one is refused before it touches anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wingbeat.core.config import Config
from wingbeat.core.errors import SetupError
from wingbeat.deploy.local import Supervisor, lock_run, make_run_dir
from wingbeat.weights.host import run_weights_dir


def test_what_agents_wrote_is_for_the_owner_of_the_run(tmp_path: Path) -> None:
    table = {"run": {"dir": str(tmp_path)}, "policies": {"solver": {"model": "builtin:calculator"}}}
    assert make_run_dir(Config.model_validate(table)).stat().st_mode & 0o777 == 0o700


async def test_a_run_that_is_running_cannot_be_resumed(tmp_path: Path) -> None:
    config = Config.model_validate({"policies": {"solver": {"model": "builtin:calculator"}}})
    weights = run_weights_dir(tmp_path)
    weights.mkdir()
    try:
        with lock_run(tmp_path):
            with pytest.raises(SetupError, match="is running already"):
                async with Supervisor(config, run_dir=tmp_path, config_dir=tmp_path):
                    raise AssertionError("entered")
            assert os.listdir(tmp_path) == ["supervisor.lock"]
            assert weights.is_dir()
        lock_run(tmp_path).close()
    finally:
        weights.rmdir()
