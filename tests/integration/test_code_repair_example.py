"""examples/code-repair, cut short, as its users start it in a copy of the folder: in the real sandbox."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, environment

EXAMPLE = ROOT / "examples" / "code-repair"
SHORT = ("--run.steps=2", "--dataflow.groups_per_step=2", "--eval.max_tasks=4", "--eval.samples_per_task=1")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]


def in_folder(work: Path, *command: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=work,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_reference_agent_earns_1_and_an_idle_one_0(tmp_path: Path) -> None:
    work = tmp_path / "code-repair"
    shutil.copytree(EXAMPLE, work, ignore=shutil.ignore_patterns("runs"))
    done = in_folder(work, "reference.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reference: mean reward 1 of 12 tasks")
    assert "\nidle: mean reward 0 of 12 tasks" in done.stdout


def test_the_tiny_model_trains_and_every_episode_is_scored(tmp_path: Path) -> None:
    work = tmp_path / "code-repair"
    shutil.copytree(EXAMPLE, work, ignore=shutil.ignore_patterns("runs"))
    done = in_folder(work, "-m", "wingbeat.cli", "train", "config.toml", "--json", *SHORT, timeout_s=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["complete"] and result["train_steps"] == 2 and result["episodes"] >= 32
    assert result["warnings"] == []
    assert all(0.0 <= evaluation["mean"] <= 1.0 for evaluation in result["evaluations"])
