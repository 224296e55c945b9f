"""Reward curves as PNG files (matplotlib, without a display)."""

from __future__ import annotations

import json
from pathlib import Path

from wingbeat.core.errors import DependencyMissing


def plot_run(run_dir: Path, out: Path, *, title: str) -> None:
    """Draw the training reward and the evaluations of a run into ``out``.

    Raises DependencyMissing without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyMissing('plots need matplotlib: pip install "wingbeat[server]"') from error
    steps, rewards, evaluations = read_curve(run_dir)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="0.75", label="training episodes, per step")
    axes.plot(steps, _smooth(rewards), color="tab:green", label="smoothed")
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), "o-", color="tab:blue", label="held-out tasks")
    axes.set(xlabel="optimiser step", ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=120)


def read_curve(run_dir: Path) -> tuple[list[int], list[float], list[tuple[int, float]]]:
    """Steps, their mean rewards, and (version, mean) of each evaluation, from the run's files."""
    steps: list[int] = []
    rewards: list[float] = []
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "rollout/reward_mean" in record:
            steps.append(record["step"])
            rewards.append(record["rollout/reward_mean"])
    evaluations = [
        (e["version"], e["mean"])
        for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
        if (e := json.loads(line))["event"] == "evaluation_done" and e["mean"] is not None
    ]
    return steps, rewards, sorted(evaluations)


def _smooth(values: list[float], keep: float = 0.8) -> list[float]:
    smoothed: list[float] = []
    for value in values:
        smoothed.append(keep * smoothed[-1] + (1 - keep) * value if smoothed else value)
    return smoothed
