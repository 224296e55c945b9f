"""examples/two-policies and examples/self-play, cut short, as their users start them in a copy of the folder."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import ROOT, environment

import wingbeat

EXAMPLES = ("two-policies", "self-play")
SHORT = ("--eval.max_tasks=8", "--eval.samples_per_task=1", "--dataflow.groups_per_step=4")


def train(folder: Path, example: str, *more: str, models: Sequence[str] = ()) -> Path:
    """Make the models and train; returns the run directory."""
    work = folder / example
    shutil.copytree(ROOT / "examples" / example, work, ignore=shutil.ignore_patterns("models", "runs"))
    for command in (["models.py", *models], ["-m", "wingbeat.cli", "train", "config.toml", *SHORT, *more]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=work,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (work / "runs").iterdir()
    return run_dir


def events(run_dir: Path, name: str) -> list[dict[str, object]]:
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_policies_train_together(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "two-policies", "--run.steps=3", models=["--steps", "150"])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {policy: [row["step"] for row in rows if row["policy"] == policy] for policy in ("solver", "verifier")}
    assert steps == {"solver": [1, 2, 3], "verifier": [1, 2, 3]}
    assert all(0 < row["rollout/reward_mean"] < 1 for row in rows if "rollout/reward_mean" in row)
    scored = {(e["name"], e["policy"], e["version"]) for e in events(run_dir, "evaluation_done")}
    assert scored == {(name, policy, v) for name, v in (("before", 0), ("after", 3)) for policy in steps}
    assert {path.name for path in (run_dir / "export").iterdir()} == set(steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_self_play_meets_its_snapshots(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "self-play", "--run.steps=3", "--policies.rival.snapshot_every=2")
    assert [(e["policy"], e["original"], e["version"]) for e in events(run_dir, "snapshot")] == [("rival", "player", 2)]
    assert [path.name for path in (run_dir / "snapshots" / "rival").glob("*.safetensors")] == ["0-00000002.safetensors"]
    assert {e["name"]: e["version"] for e in events(run_dir, "evaluation_done")} == {"before": 0, "after": 3}
    assert events(run_dir, "trainer_failed") == events(run_dir, "engine_failed") == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_imports_only_public_names(example: str) -> None:
    for path in (ROOT / "examples" / example).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "wingbeat":
                assert node.attr in wingbeat.__all__, f"{path.name}: wingbeat.{node.attr}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wingbeat":
                assert node.module == "wingbeat", f"{path.name}: {node.module}"
                assert {alias.name for alias in node.names} <= set(wingbeat.__all__), path.name
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("wingbeat.") for alias in node.names), path.name
