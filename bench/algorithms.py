"""Every algorithm on one small task with three seeds: ``python -m bench.algorithms [--quick] [--table]``.

The task is the calculator of ``wingbeat demo``: call a tool, report its result, reward 1 if exact.  Each seed has a
model of its own, warmed up on careless demonstrations, and held-out tasks.  The last line of output is one JSON
object; ``--table`` prints a table in Markdown before it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from transformers.utils import logging

from bench.calculator_training import Recipe, Trained, train
from bench.training import machine
from wingbeat.core.config.trainer import Algorithm
from wingbeat.environments.calculator.model import write_model

REWARD_BAR = 0.8
CONTROL_BAR = 0.5
"""What the negative control must stay below."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
SUPERVISED: frozenset[Algorithm] = frozenset({"sft", "distill"})
"""They learn from what is shown to them, not from rewards, and are reported without the bar of the others."""
TEACHER: Literal["rloo"] = "rloo"
"""Whose trained model teaches ``distill``."""
COMMON: Mapping[str, Any] = {
    "learning_rate": 1.5e-3,
    "schedule": "linear",
    "warmup_steps": 5,
    "min_lr_ratio": 0.1,
    "updates_per_batch": 2,
}
"""Two updates per batch, so that the second is off-policy and ratios, clips and masks have something to do."""
OWN: Mapping[Algorithm, Mapping[str, Any]] = {
    "ppo": {"critic": {"learning_rate": 3e-3, "updates_per_batch": 2}},
}
"""What differs from :data:`COMMON` and the algorithm's defaults."""
EVAL_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Found:
    """What came of all trainings, by seed."""

    algorithms: Mapping[Algorithm, Sequence[Trained]]
    control: Sequence[Trained]
    """:data:`TEACHER` with shuffled advantages: what a policy "learns" from noise."""


def recipe(algorithm: Algorithm, *, steps: int, teacher: Path, control: bool = False) -> Recipe:
    """How an algorithm is run here; ``control`` shuffles its advantages over the batch."""
    trainer = {**COMMON, **OWN.get(algorithm, {}), "algorithm": algorithm}
    if control:
        trainer["control"] = "shuffled_advantages"
    if algorithm == "distill":
        trainer["teacher"] = str(teacher)
    return Recipe(trainer, steps=steps, samples_equal_groups_again=algorithm == "dapo")


def measure(seeds: Sequence[int], *, algorithms: Sequence[Algorithm], steps: int, eval_samples: int) -> Found:
    """Every algorithm on every seed; algorithms take turns, so that a slow hour is unfair to none."""
    found: dict[Algorithm, list[Trained]] = {}
    controls: list[Trained] = []
    others: list[Algorithm] = [name for name in algorithms if name != TEACHER]
    teacher_first: list[Algorithm] = [TEACHER, *others] if {TEACHER, "distill"} & set(algorithms) else others
    with tempfile.TemporaryDirectory(prefix="wingbeat-algorithms-") as folder:
        for seed in seeds:
            model, teacher = Path(folder, f"model-{seed}"), Path(folder, f"teacher-{seed}")
            write_model(model, seed)
            for algorithm in teacher_first:
                settings = recipe(algorithm, steps=steps, teacher=teacher)
                if algorithm == TEACHER:
                    settings = replace(settings, export=teacher)
                found.setdefault(algorithm, []).append(
                    _run(algorithm, settings, model=model, seed=seed, eval_samples=eval_samples)
                )
            shuffled = recipe(TEACHER, steps=steps, teacher=teacher, control=True)
            controls.append(_run("control", shuffled, model=model, seed=seed, eval_samples=eval_samples))
    return Found(found, controls)


def _run(name: str, settings: Recipe, *, model: Path, seed: int, eval_samples: int) -> Trained:
    done = train(model, settings, seed=seed, eval_samples=eval_samples)
    sys.stderr.write(f"{name}, seed {seed}: {done.final_reward:.3f} in {done.time_s:.1f} s\n")
    return done


def report(found: Found) -> dict[str, Any]:
    """Per algorithm the mean over seeds, and whether the bar holds on every seed."""
    learners: list[Algorithm] = [name for name in found.algorithms if name not in SUPERVISED]
    return {
        **{name: figures(runs) for name, runs in found.algorithms.items()},
        "control_shuffled_advantages": figures(found.control),
        "bars": {
            **{
                f"{name} >= {REWARD_BAR} on every seed": min(run.final_reward for run in found.algorithms[name])
                >= REWARD_BAR
                for name in learners
            },
            f"control_shuffled_advantages < {CONTROL_BAR} on every seed": max(run.final_reward for run in found.control)
            < CONTROL_BAR,
        },
    }


def figures(runs: Sequence[Trained]) -> dict[str, Any]:
    return {
        "final_reward": round(fmean(run.final_reward for run in runs), 4),
        "time_s": round(fmean(run.time_s for run in runs), 2),
        "cpu_s": round(fmean(run.cpu_s for run in runs), 2),
        "final_reward_by_seed": [round(run.final_reward, 4) for run in runs],
        "first_reward": round(fmean(run.curve[0] for run in runs), 4),
        "steps_to_bar": steps_to_bar(runs),
    }


def steps_to_bar(runs: Sequence[Trained], *, window: int = 5) -> float | None:
    """Steps until the mean training reward of the last few steps passes the bar; mean over seeds, None if one never."""
    steps: list[int] = []
    for run in runs:
        means = [fmean(run.curve[end - window : end]) for end in range(window, len(run.curve) + 1)]
        passed = next((index for index, mean in enumerate(means) if mean >= REWARD_BAR), None)
        if passed is None:
            return None
        steps.append(passed + window)
    return round(fmean(steps), 1)


def table(summary: Mapping[str, Any], names: Sequence[Algorithm]) -> str:
    """In Markdown, for the documentation."""
    lines = [
        "| algorithm | held-out reward, each seed | mean | steps to 0.8 | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in names:
        row = summary[name]
        seeds = ", ".join(f"{reward:.2f}" for reward in row["final_reward_by_seed"])
        steps = "never" if row["steps_to_bar"] is None else f"{row['steps_to_bar']:.0f}"
        lines.append(f"| `{name}` | {seeds} | {row['final_reward']:.3f} | {steps} | {row['time_s']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.algorithms", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 steps, one seed, few episodes")
    parser.add_argument("--seeds", type=int, default=3, help="models and task splits")
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps of each run")
    parser.add_argument("--table", action="store_true", help="print a table in Markdown, too")
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, help="run only these")
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    quick: bool = arguments.quick
    names: tuple[Algorithm, ...] = tuple(arguments.only or ALGORITHMS)
    steps: int = 2 if quick else arguments.steps
    eval_samples = 1 if quick else EVAL_SAMPLES
    seeds = range(1 if quick else arguments.seeds)
    found = measure(seeds, algorithms=names, steps=steps, eval_samples=eval_samples)
    summary = {
        "description": describe(steps, eval_samples=eval_samples),
        **report(found),
        "quick": quick,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }
    if arguments.table:
        sys.stdout.write(table(summary, names) + "\n")
    sys.stdout.write(json.dumps(summary) + "\n")


def describe(steps: int, *, eval_samples: int) -> str:
    sample = Recipe({})
    own = {name: dict(settings) for name, settings in OWN.items()}
    return (
        f"{steps} steps of {sample.groups_per_step} groups of {sample.group_size} calculator episodes, in one process "
        f"with one thread: the embedded engine and the trainer. final_reward: mean over 105 held-out tasks, "
        f"{eval_samples} episodes each. time_s and cpu_s: sampling and training. Settings of all: {dict(COMMON)}; "
        f"of some: {own}. distill: the teacher is what {TEACHER} made of the same model. dapo samples groups of equal "
        f"rewards again. control_shuffled_advantages: {TEACHER}, its advantages dealt to random episodes."
    )


if __name__ == "__main__":
    main()
