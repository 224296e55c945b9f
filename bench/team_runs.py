"""Runs the team under one mode of scheduling, as ``wingbeat train`` would, and reads what came of it.

Control, the engine, both trainers and the agent's client are processes of their own; their CPU time is read from
Linux while they run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import team_agent
from bench.machine import TICKS_PER_S
from bench.team_work import CONTEXT_TOKENS, POLICIES, Work, critical_path_s, make_tasks, write_model, write_tasks
from wingbeat.core.config import Config
from wingbeat.core.events import read_events
from wingbeat.deploy.training import TrainingPlan, TrainingResult, run_plan

MODES = ("sync", "barrier", "ours")
SAMPLE_EVERY_S = 0.2
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step, in seconds of the wall clock."""

    ended_s: float
    train_s: float

    @property
    def began_s(self) -> float:
        return self.ended_s - self.train_s


@dataclass(frozen=True, slots=True)
class TeamRun:
    """What one run took and gave."""

    mode: str
    seed: int
    wall_s: float
    """From all workers being up to the last step of the last policy."""
    steps: Mapping[str, list[Step]]
    """Per policy."""
    cpu_s: Mapping[str, float]
    """Per process, in the same time."""
    group_paths_s: tuple[float, ...]
    """What the tools of each training group take at least."""
    rewards: Mapping[str, dict[str, float]]
    """Per policy, held-out reward after training by task."""
    curves: Mapping[str, list[float]]
    """Per policy, mean training reward of the episodes that ended before each step."""
    staleness_max: int
    discard_rate: float
    episodes: int
    sampled_tokens: int
    forward_tokens: float
    """Of all steps of all trainers."""


@dataclass
class CpuMeter:
    """CPU seconds of this process's children by name, sampled on a thread."""

    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list[tuple[float, dict[str, float]]])
    """(wall clock, per process), oldest first."""
    _names: dict[int, str] = field(default_factory=dict[int, str])

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._sample_until, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """CPU seconds that each process used in a time."""
        first = next((found for at, found in self.samples if at >= start_s), {})
        last = next((found for at, found in reversed(self.samples) if at <= end_s), {})
        return {name: used - first.get(name, 0.0) for name, used in last.items()}

    def _sample_until(self, stop: threading.Event) -> None:
        while not stop.wait(SAMPLE_EVERY_S):
            self.samples.append((time.time(), self._read()))

    def _read(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            with suppress(OSError):  # it has ended meanwhile
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    name = self._name(int(entry.name))
                    found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        return found

    def _name(self, pid: int) -> str:
        name = self._names.get(pid, OTHER)
        if name == OTHER:  # perhaps a child that has yet to become what it will be
            name = self._names[pid] = process_name(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        return name


def process_name(words: list[str]) -> str:
    """``control``, ``agent``, or a worker's id."""
    if "--worker-id" in words:
        return words[words.index("--worker-id") + 1]
    if "wingbeat.server" in words:
        return "control"
    return "agent" if "rollout" in words else OTHER


def team_config(work: Work, *, mode: str, seed: int, folder: Path, models: Mapping[str, Path], tasks: Path) -> Config:
    """One mode differs from another in two keys only."""
    dataflow: dict[str, Any] = {
        "group_size": work.group_size,
        "groups_per_step": work.groups_per_step,
        "max_staleness": 0 if mode == "sync" else work.max_staleness,
        "barrier": mode != "ours",
        "drop_zero_variance": False,  # groups that have learnt all there is are trained like others: the same work
    }
    trainer = {
        "algorithm": work.algorithm,
        "learning_rate": work.learning_rate,
        # All steps are the same work, whatever the policies say: the penalty's gradient is of every token, and
        # replies that become alike share no forward.
        "kl_coef": work.kl_coef,
        "prefix_tree": "off",
        "checkpoint_every": 10 * work.steps,
        "threads": 1,
    }
    return Config.model_validate(
        {
            "run": {"name": f"{mode}-{seed}", "dir": str(folder), "seed": seed, "steps": work.steps},
            "server": {"port": 0},
            "policies": {
                name: {"model": str(models[name]), "context_tokens": CONTEXT_TOKENS, "trainer": trainer}
                for name in POLICIES
            },
            "engine": {"threads": 1, "max_running": 128},
            "dataflow": dataflow,
            "tasks": {"file": str(tasks)},
            "eval": {"at_start": False, "samples_per_task": work.eval_samples},
            "agent": {"path": str(Path(team_agent.__file__)), "concurrency": 2 * work.capacity},
        }
    )


def run_team(work: Work, *, mode: str, seed: int, folder: Path) -> TeamRun:
    """A whole run.  Raises SetupError where it does not complete."""
    train, evaluation = make_tasks(work, seed=seed)
    tasks = write_tasks(folder, train, evaluation)
    models = {name: write_model(folder / name, work, seed=2 * seed + index) for index, name in enumerate(POLICIES)}
    config = team_config(work, mode=mode, seed=seed, folder=folder, models=models, tasks=tasks)
    meter = CpuMeter()
    with meter.running():
        result = run_plan(TrainingPlan(config, config_dir=folder, on_note=lambda text: None))
    paths = tuple(critical_path_s(task.payload["sleep_s"]) for task in train)
    return read_run(result, meter=meter, mode=mode, seed=seed, group_paths_s=paths)


def read_run(
    result: TrainingResult, *, meter: CpuMeter, mode: str, seed: int, group_paths_s: tuple[float, ...]
) -> TeamRun:
    """What the events, the evaluations and the meter tell of a run."""
    events = read_events(result.run_dir / "events.jsonl")
    steps = {name: [e for e in events if e["event"] == "step" and e["policy"] == name] for name in POLICIES}
    start_s = max(e["t"] for e in events if e["event"] in ("trainer_ready", "engine_joined"))
    end_s = max(e["t"] for found in steps.values() for e in found)
    summary = result.summary
    sys.stderr.write(f"{mode}, seed {seed}: {end_s - start_s:.1f} s, {result.run_dir}\n")
    return TeamRun(
        mode=mode,
        seed=seed,
        wall_s=end_s - start_s,
        steps={name: [Step(e["t"], e["time/train_s"]) for e in found] for name, found in steps.items()},
        cpu_s=meter.between(start_s, end_s),
        group_paths_s=group_paths_s,
        rewards={
            done.spec.policy: {task: sum(r) / len(r) for task, r in done.rewards.items()}
            for done in result.evaluations
            if done.spec.name == "after"
        },
        curves={
            name: [e["rollout/reward_mean"] for e in found if "rollout/reward_mean" in e]
            for name, found in steps.items()
        },
        staleness_max=summary["staleness_max"],
        discard_rate=summary["discard_rate"],
        episodes=summary["episodes"],
        sampled_tokens=summary["sampled_tokens"],
        forward_tokens=sum(e["perf/forward_tokens"] for found in steps.values() for e in found),
    )
