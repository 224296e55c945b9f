"""``wingbeat demo`` as a newcomer runs it: it learns, it survives kills, and only reinforcement teaches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = {
    "eval_before",
    "eval_after",
    "wall_s",
    "train_steps",
    "episodes",
    "sampled_tokens",
    "staleness_max",
    "overlap_frac",
    "discard_rate",
    "run_dir",
}


WITH_PRESET = """
import dataclasses, json, sys
from wingbeat.cli import demo, main
demo.DEMO_PRESET = dataclasses.replace(demo.DEMO_PRESET, **json.loads(sys.argv.pop(1)))
main.main()
"""


def start_demo(directory: Path, *arguments: str, **preset: Any) -> subprocess.Popen[str]:
    """``preset`` is what differs from the settings of the demo."""
    python = ["-c", WITH_PRESET, json.dumps(preset)] if preset else ["-m", "wingbeat.cli"]
    command = [sys.executable, *python, "demo", "--json", "--dir", str(directory), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=560)
    assert process.returncode == 0, err[-3000:]
    result = json.loads(out.splitlines()[-1])
    assert set(result) == KEYS
    return result


def eventually(condition: Callable[[], Any], *, what: str, deadline_s: float = 240.0) -> Any:
    """Bounded polling of files that another process writes."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {deadline_s:.0f} s: {what}")


def run_dir_in(directory: Path) -> Path | None:
    return next(iter(directory.glob("demo-*")), None)


def events_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [e for line in lines if line.endswith("\n") and (e := json.loads(line))["event"] == name]


def pid_of(run_dir: Path, name: str) -> int:
    return int(json.loads((run_dir / "processes.json").read_text())[name])


def health(run_dir: Path) -> str:
    url = json.loads((run_dir / "server.json").read_text())["url"]
    with urllib.request.urlopen(f"{url}/healthz", timeout=10) as reply:
        return json.load(reply)["status"]


def test_the_demo_learns_although_its_engine_and_its_trainer_are_killed(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--seed", "0")
    try:
        run_dir = eventually(lambda: run_dir_in(tmp_path), what="a run directory")
        eventually(lambda: len(events_of(run_dir, "step")) >= 5, what="five steps")
        control = pid_of(run_dir, "control")

        os.kill(pid_of(run_dir, "engine-0"), signal.SIGKILL)
        eventually(lambda: len(events_of(run_dir, "engine_joined")) == 2, what="the engine's return")
        assert health(run_dir) == "ok"
        steps = len(events_of(run_dir, "step"))
        eventually(lambda: len(events_of(run_dir, "step")) > steps + 2, what="steps after the engine's return")

        os.kill(pid_of(run_dir, "trainer-solver"), signal.SIGKILL)
        eventually(lambda: len(events_of(run_dir, "trainer_ready")) == 2, what="the trainer's return")
        assert health(run_dir) == "ok"
        assert pid_of(run_dir, "control") == control
        result = result_of(process)
    finally:
        process.kill()
    replays = events_of(run_dir, "replayed")
    assert all(replay["exact"] for replay in replays)
    assert result["eval_before"] < 0.35
    assert result["eval_after"] >= 0.9
    assert result["train_steps"] == 90
    assert result["staleness_max"] <= 2
    assert result["discard_rate"] < 0.01
    assert result["overlap_frac"] > 0.2
    assert (run_dir / "reward.png").stat().st_size > 5_000
    steps_taken = [event["step"] for event in events_of(run_dir, "step")]
    assert steps_taken == list(range(1, 91)), "every step counts once, whatever is replayed"


def test_the_demo_learns_with_another_seed(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--seed", "1")
    try:
        result = result_of(process)
    finally:
        process.kill()
    assert result["eval_before"] < 0.35
    assert result["eval_after"] >= 0.9
    assert result["episodes"] >= 90 * 64, "every step trained on whole groups"


def test_without_reinforcement_nothing_is_learnt(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--seed", "0", "--control", "shuffled-advantages")
    try:
        result = result_of(process)
    finally:
        process.kill()
    assert result["eval_before"] < 0.35
    assert result["eval_after"] - result["eval_before"] < 0.05


def test_at_a_learning_rate_of_zero_no_weight_moves(tmp_path: Path) -> None:
    """So ten steps tell as much as ninety, and two samples of a task as much as sixteen."""
    process = start_demo(tmp_path, "--seed", "0", "--control", "lr0", steps=10, control_eval_samples=2)
    try:
        result = result_of(process)
    finally:
        process.kill()
    assert result["train_steps"] == 10
    assert max(result["eval_before"], result["eval_after"]) < 0.45
    run_dir = Path(result["run_dir"])
    model = json.loads((run_dir / "launch.json").read_text())["models"]["solver"]
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(model), run_dir / "export" / "solver"))
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not np.array_equal(tensor, after[name])] == []
