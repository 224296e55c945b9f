"""A policy trained by two processes, one of which is killed: the run goes on as if it had not been."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import alive, check_ledger, children_of, eventually_now, serving, train_config
from safetensors.torch import load_file

STEPS = 6
pytestmark = pytest.mark.slow


def test_a_killed_rank_takes_its_trainer_along_and_nothing_is_lost(tmp_path: Path, models: Path) -> None:
    config = train_config(
        tmp_path,
        models,
        run__steps=STEPS,
        policies__solver__trainer__processes=2,
        policies__solver__trainer__checkpoint_every=2,
        policies__solver__trainer__threads=1,
        eval__max_tasks=2,
    )
    with serving(tmp_path, config, command="train") as server:
        eventually_now(lambda: len(server.events_named("step")) >= 3, what="three steps", timeout_s=100)
        trainer = server.pid("trainer-solver")
        (rank,) = children_of(trainer)
        os.kill(rank, signal.SIGKILL)
        eventually_now(lambda: server.events_named("replayed"), what="the trainer to be back", timeout_s=100)
        assert not alive(trainer)
        second = server.pid("trainer-solver")
        (other,) = children_of(second)
        assert server.supervisor.wait(120) == 0
        eventually_now(lambda: not alive(second) and not alive(other), what="all ranks to end")
        (replayed,) = server.events_named("replayed")
        assert replayed["exact"] is True
        check_ledger(server.run_dir, steps=STEPS)
        log = (server.run_dir / "logs" / "trainer-solver.log").read_text()
        assert "rank 1 of this trainer ended (exit code -9); all its processes begin again" in log
        parts = [path.name for path in (server.run_dir / "checkpoints" / "solver").glob("*/part-*")]
        assert parts.count("part-00001-of-00002.safetensors") == parts.count("part-00000-of-00002.safetensors") > 0
        assert load_file(server.run_dir / "export" / "solver" / "model.safetensors")
