"""examples/code-repair, cut short, as its users start it in a copy of the folder: in the real sandbox."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
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


def test_one_command_plays_the_scripted_agents_and_trains_the_tiny_model(tmp_path: Path) -> None:
    work = tmp_path / "code-repair"
    shutil.copytree(EXAMPLE, work, ignore=shutil.ignore_patterns("runs"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(work / "run.sh"), "--json", *SHORT],
        cwd=tmp_path,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=680,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reference, idle, trained = done.stdout.split("\n", 2)
    assert reference.startswith("reference: mean reward 1 of 12 tasks")
    assert idle.startswith("idle: mean reward 0 of 12 tasks")
    result = json.loads(trained)
    assert result["complete"] and result["train_steps"] == 2 and result["episodes"] >= 32
    assert result["warnings"] == []
    assert all(0.0 <= evaluation["mean"] <= 1.0 for evaluation in result["evaluations"])


def test_without_short_cuts_it_trains_twenty_steps() -> None:
    config = tomllib.loads((EXAMPLE / "config.toml").read_text(encoding="utf-8"))
    assert (config["run"]["steps"], config["tasks"]["environment"]) == (20, "code-repair")
    assert config["tasks"]["options"].get("box", "sandbox") == "sandbox"
    assert config["policies"]["solver"]["model"] == "builtin:code-repair"
