"""Whole training of the vowel task: ours as ``wingbeat train`` runs it, TRL's in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import trainer_trl_environment, vowel_agent
from bench.team_work import CONTEXT_TOKENS, write_tasks
from bench.trainer_work import POLICY, TaskShape, questions, task_model, tasks, write_job
from wingbeat.core.config import Config
from wingbeat.core.events import read_events
from wingbeat.deploy.training import TrainingPlan, run_plan

SMOOTHED = 3
"""Steps whose mean reward counts."""


@dataclass(frozen=True, slots=True)
class Run:
    """One whole training."""

    system: str
    seed: int
    begun_s: float
    """When the first prompt could be answered: start-up is not compared."""
    ended_s: list[float]
    """Of each step."""
    rewards: list[float]
    """Mean of the batch that each step trained."""

    @property
    def steps_per_s(self) -> float:
        """From the end of the first step to that of the last."""
        return (len(self.ended_s) - 1) / (self.ended_s[-1] - self.ended_s[0])

    def time_to(self, target: float) -> float | None:
        """Seconds until the mean reward of three steps reached ``target``; None: never."""
        for step in range(SMOOTHED, len(self.rewards) + 1):
            if sum(self.rewards[step - SMOOTHED : step]) / SMOOTHED >= target:
                return self.ended_s[step - 1] - self.begun_s
        return None


def run_ours(shape: TaskShape, *, seed: int, folder: Path) -> Run:
    """Control with its gateway, an engine, a trainer and a client, all processes of their own.

    Raises SetupError where the run does not complete.
    """
    extra = (shape.max_staleness + 2) * shape.groups_per_step + 1
    found = tasks(shape, questions(shape, seed=seed, extra=extra))
    path = write_tasks(folder, found[:-1], found[-1:])
    config = _config(shape, seed=seed, folder=folder, tasks_file=path)
    result = run_plan(TrainingPlan(config, config_dir=folder, on_note=lambda text: None))
    events = read_events(result.run_dir / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    begun_s = max(event["t"] for event in events if event["event"] in ("trainer_ready", "engine_joined"))
    return Run("ours", seed, begun_s, [e["t"] for e in steps], [e["reward/mean"] for e in steps])


def _config(shape: TaskShape, *, seed: int, folder: Path, tasks_file: Path) -> Config:
    trainer: dict[str, Any] = {
        "algorithm": "grpo",
        "learning_rate": shape.learning_rate,
        "betas": shape.betas,
        "clip_low": shape.clip[0],
        "clip_high": shape.clip[1],
        "micro_batch_tokens": 4096,
        "checkpoint_every": 10 * shape.steps,
        "threads": 1,
    }
    return Config.model_validate(
        {
            "run": {"name": f"vowels-{seed}", "dir": str(folder), "seed": seed, "steps": shape.steps},
            "server": {"port": 0},
            "policies": {
                POLICY: {
                    "model": str(task_model(folder / "model", shape, seed=seed)),
                    "context_tokens": CONTEXT_TOKENS,
                    "trainer": trainer,
                }
            },
            "engine": {"threads": 1, "max_running": 128},
            "dataflow": {
                "group_size": shape.group_size,
                "groups_per_step": shape.groups_per_step,
                "max_staleness": shape.max_staleness,
                "drop_zero_variance": False,
            },
            "tasks": {"file": str(tasks_file)},
            "eval": {"at_start": False, "at_end": False},
            "agent": {
                "path": str(Path(vowel_agent.__file__)),
                "concurrency": (shape.max_staleness + 1) * shape.groups_per_step * shape.group_size,
            },
        }
    )


def run_trl(shape: TaskShape, *, seed: int, folder: Path, **settings: Any) -> Run:
    """TRL with both cores to itself."""
    rows = shape.groups_per_step * shape.group_size
    job = write_job(
        folder / "job.json",
        model=str(task_model(folder / "model", shape, seed=seed)),
        questions=questions(shape, seed=seed, extra=0),
        steps=shape.steps,
        rows=rows,
        group_size=shape.group_size,
        max_tokens=shape.max_tokens,
        learning_rate=shape.learning_rate,
        betas=shape.betas,
        clip=shape.clip,
        seed=seed,
        **{"micro_rows": rows // 4, "threads": os.cpu_count() or 1, **settings},
    )
    found = trl_output("run", job)
    return Run("trl", seed, found["begun_s"], found["ended_s"], found["rewards"])


def trl_output(kind: str, job: Path) -> dict[str, Any]:
    """The last line of TRL's side.  Raises RuntimeError with what it said where it fails."""
    script = Path(__file__).with_name("trainer_trl.py")
    return last_line(
        [str(trainer_trl_environment.python()), str(script), kind, str(job)],
        {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def our_step_output(job: Path) -> dict[str, Any]:
    return last_line([sys.executable, "-m", "bench.trainer_step", str(job)], {})


def last_line(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What a process printed last, as JSON.  Raises RuntimeError where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
