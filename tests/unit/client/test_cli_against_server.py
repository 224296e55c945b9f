"""``wingbeat rollout`` and ``wingbeat eval`` against a server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wingbeat.cli.main import app

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands set up logging for their process."""
    loggers = [logging.getLogger(name) for name in ("", "httpx", "httpx2")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def write_agent(folder: Path, *, reward: str = "0.5") -> str:
    path = folder / "agent.py"
    path.write_text(f"import os, wingbeat\n@wingbeat.agent\nasync def solve(episode):\n    return {reward}\n")
    return str(path)


def test_rollout_runs_and_counts(server: Any, tmp_path: Path) -> None:
    server.add_leases(4)
    done = CliRunner().invoke(app, ["rollout", write_agent(tmp_path), "--server", server.url, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "finished": 4,
        "failed": 0,
        "refused": 0,
        "cancelled": 0,
        "timed_out": 0,
        "mean_reward": 0.5,
    }


def test_rollout_takes_server_and_key_from_the_environment(server: Any, tmp_path: Path) -> None:
    server.admin_key = "admin-key-of-16-characters"
    server.add_leases(2)
    agent = write_agent(tmp_path, reward="0.5 - sum(name.startswith('WINGBEAT_KEY') for name in os.environ)")
    environment = {"WINGBEAT_URL": server.url, "WINGBEAT_KEY": server.admin_key, "WINGBEAT_KEY_WEST": "another"}
    done = CliRunner().invoke(app, ["rollout", agent, "--split", "train"], env=environment)
    assert "2 episodes finished, mean reward 0.500" in done.output
    done = CliRunner().invoke(app, ["rollout", agent, "--server", server.url])
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (1, "error: expected a key")


def test_eval_shows_a_table(server: Any) -> None:
    done = CliRunner().invoke(app, ["eval", "--server", server.url, "--policy", "solver", "--samples-per-task", "2"])
    assert done.exit_code == 0, done.output
    assert "solver@3" in done.stdout
    assert "0.7500" in done.stdout
    assert "0.500, 1.000" in done.stdout
    assert server.evaluations[0]["body"]["samples_per_task"] == 2


def test_eval_as_json(server: Any) -> None:
    done = CliRunner().invoke(app, ["eval", "--server", server.url, "--json"])
    assert json.loads(done.stdout)["mean_reward"] == 0.75
