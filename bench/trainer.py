"""Our trainer against TRL's GRPOTrainer: ``python -m bench.trainer [--quick] [--seeds N] [--only PART ...]``.

    steps   one optimiser step on the same batch, same model, one thread each: CPU seconds and peak memory, in fresh
            processes; systems take turns and the least counts
    head    logprobs and entropies of many tokens over a large vocabulary, ours against logits that are written down
    runs    whole training of one single-turn task from random weights, same settings: ours through the gateway, with
            engine, trainer, server and client in processes of their own; TRL in one process with both cores

TRL lives in a virtual environment of its own, which the first run makes.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import trainer_trl_environment
from bench.machine import describe_machine
from bench.trainer_runs import Run, last_line, our_step_output, run_ours, run_trl, trl_output
from bench.trainer_work import BatchShape, TaskShape, make_groups, write_job
from bench.training import SMALL, ModelSize, model_folder

TRAIN_BAR, RUN_BAR = 1.3, 1.5
HEAD_PEAK_BAR, HEAD_SPEED_BAR = 0.1, 0.95
PARTS = ("steps", "head", "runs")
LONG_TAILED = BatchShape("long-tailed", "long-tailed")
EQUAL = BatchShape("equal", "equal", prompt=(32, 32), completion=160.0)
MICRO_ROWS = (4, 8)
"""TRL's `per_device_train_batch_size`; what is fastest differs by batch, and the best counts."""
MICRO_TOKENS = 2048
BASE: Mapping[str, Any] = {
    "threads": 1,
    "learning_rate": 1e-6,
    "betas": (0.9, 0.95),
    "clip": (0.2, 0.2),
    "seed": 0,
}
TRL_SETTINGS = (
    "adamw_torch_fused, beta 0, num_iterations 1 (no pass for old logprobs), float32 without autocast, no gradient "
    "checkpointing, transformers' generate; its fused chunked head is on, as TRL always has it"
)


def progress(text: str) -> None:
    sys.stderr.write(text + "\n")


# --- steps --------------------------------------------------------------------------------------


def measure_steps(shape: BatchShape, *, size: ModelSize, repeats: int, steps: int) -> dict[str, Any]:
    """Trained tokens per CPU second of both, and what their processes peaked at."""
    groups = make_groups(shape, seed=0)
    tokens = sum(len(completion) for group in groups for completion in group["completions"])
    rows = shape.groups * shape.group_size
    with model_folder(size) as folder, tempfile.TemporaryDirectory() as name:
        facts = {**BASE, "model": str(folder), "groups": groups, "steps": steps, "rows": rows}
        facts |= {"group_size": shape.group_size, "max_tokens": shape.longest}
        path = Path(name) / "job.json"

        def ours() -> dict[str, Any]:
            return our_step_output(write_job(path, **facts, trainer={"micro_batch_tokens": MICRO_TOKENS}))

        def trl(micro_rows: int) -> Callable[[], dict[str, Any]]:
            return lambda: trl_output("step", write_job(path, **facts, micro_rows=micro_rows))

        systems = {"ours": ours} | {f"trl, {count} rows": trl(count) for count in MICRO_ROWS if count <= rows}
        found = _take_turns(systems, repeats=repeats, label=shape.name)
    best = min((name for name in found if name != "ours"), key=lambda name: found[name]["cpu_s"])
    mine, theirs = found["ours"], found[best]
    return {
        "batch": shape.describe(),
        "trained_tokens": tokens,
        "ours_tokens_per_s": tokens / mine["cpu_s"],
        "trl_tokens_per_s": tokens / theirs["cpu_s"],
        "ratio_vs_trl": theirs["cpu_s"] / mine["cpu_s"],
        "ours_peak_mib": mine["peak_kib"] / 1024,
        "trl_peak_mib": theirs["peak_kib"] / 1024,
        "trl_least_peak_mib": min(found[name]["peak_kib"] for name in found if name != "ours") / 1024,
        "ours_imported_mib": mine["imported_kib"] / 1024,
        "trl_imported_mib": theirs["imported_kib"] / 1024,
        "peak_memory_ratio": mine["peak_kib"] / theirs["peak_kib"],
        "trl_best": best,
    }


def _take_turns(
    systems: Mapping[str, Callable[[], dict[str, Any]]], *, repeats: int, label: str
) -> dict[str, dict[str, float]]:
    """Least CPU seconds of a step, and least peak, of each system."""
    found: dict[str, dict[str, float]] = {}
    for repeat in range(repeats):
        for name, measure in systems.items():
            got = measure()
            seen = {"cpu_s": min(got["cpu_s"]), "peak_kib": got["peak_kib"], "imported_kib": got["imported_kib"]}
            progress(f"{label}, {name}, {repeat + 1} of {repeats}: {seen['cpu_s']:.2f} s, {seen['peak_kib'] >> 10} MiB")
            before = found.setdefault(name, seen)
            found[name] = {key: min(value, before[key]) for key, value in seen.items()}
    return found


# --- head ---------------------------------------------------------------------------------------


def measure_head(sizes: Sequence[str], *, repeats: int) -> dict[str, Any]:
    """What whole logits take, over what ours takes."""
    found: dict[str, dict[str, float]] = {}
    for _ in range(repeats):
        for kind in ("naive", "ours"):
            got = last_line([sys.executable, "-m", "bench.trainer_head", kind, *sizes], {})
            progress(f"head, {kind}: {got['cpu_s']:.2f} s, {got['peak_kib'] >> 10} MiB")
            before = found.setdefault(kind, got)
            found[kind] = {key: min(value, before[key]) for key, value in got.items()}
    return {
        "speed_ratio_vs_naive": found["naive"]["cpu_s"] / found["ours"]["cpu_s"],
        "peak_ratio_vs_naive": found["ours"]["peak_kib"] / found["naive"]["peak_kib"],
        "naive_peak_mib": found["naive"]["peak_kib"] / 1024,
        "ours_peak_mib": found["ours"]["peak_kib"] / 1024,
    }


# --- runs ---------------------------------------------------------------------------------------


def measure_runs(shape: TaskShape, *, seeds: int, trl_threads: Sequence[int]) -> dict[str, Any]:
    """Steps per second, and seconds until the reward is reached; TRL with whichever number of threads is faster."""
    runs: list[Run] = []
    threads = trl_threads[0]
    if len(trl_threads) > 1:
        probes = {count: _run(run_trl, replace(shape, steps=4), seed=0, threads=count) for count in trl_threads}
        threads = max(probes, key=lambda count: probes[count].steps_per_s)
    for seed in range(seeds):
        runs.append(_run(run_ours, shape, seed=seed))
        runs.append(_run(run_trl, shape, seed=seed, threads=threads))
    by_system = {name: [run for run in runs if run.system == name] for name in ("ours", "trl")}
    speeds = {name: fmean(run.steps_per_s for run in found) for name, found in by_system.items()}
    times = {name: [run.time_to(shape.target) for run in found] for name, found in by_system.items()}
    reached = {name: [time_s for time_s in found if time_s is not None] for name, found in times.items()}
    comparable = all(len(found) == seeds for found in reached.values())
    return {
        "task": shape.describe(),
        "trl_threads": threads,
        "ours_steps_per_s": speeds["ours"],
        "trl_steps_per_s": speeds["trl"],
        "ratio_vs_trl": speeds["ours"] / speeds["trl"],
        "target_reward": shape.target,
        "time_to_reward_s": times,
        "time_to_reward_ratio": fmean(reached["ours"]) / fmean(reached["trl"]) if comparable else None,
        "curves": {
            name: [[round(value, 3) for value in run.rewards] for run in found] for name, found in by_system.items()
        },
    }


def _run(system: Callable[..., Run], shape: TaskShape, *, seed: int, **settings: Any) -> Run:
    with tempfile.TemporaryDirectory(prefix="wingbeat-trainer-") as folder:
        run = system(shape, seed=seed, folder=Path(folder), **settings)
    reached = run.time_to(shape.target)
    progress(
        f"{run.system}, seed {seed}, {settings or 'as configured'}: {run.steps_per_s:.3f} steps/s, reward "
        f"{run.rewards[0]:.2f} to {run.rewards[-1]:.2f}, {shape.target} after "
        f"{'never' if reached is None else f'{reached:.1f} s'}"
    )
    return run


# --- all ----------------------------------------------------------------------------------------


def measure(parts: Sequence[str], *, quick: bool, seeds: int) -> dict[str, Any]:
    trainer_trl_environment.python()
    found: dict[str, Any] = {}
    if "steps" in parts:
        size, repeats, steps = (SMALL, 1, 2) if quick else (ModelSize(), 2, 3)
        shapes = (
            (replace(LONG_TAILED, groups=2, longest=96), replace(EQUAL, groups=2)) if quick else (LONG_TAILED, EQUAL)
        )
        by_batch = {shape.name: measure_steps(shape, size=size, repeats=repeats, steps=steps) for shape in shapes}
        found["train_only"] = {**by_batch["long-tailed"], "equal_lengths": by_batch["equal"]}
        found["peak_memory_ratio"] = max(done["peak_memory_ratio"] for done in by_batch.values())
    if "head" in parts:
        found["head"] = measure_head(("512", "4096") if quick else (), repeats=1 if quick else 2)
    if "runs" in parts:
        shape = TaskShape(steps=6, groups_per_step=4, hidden=64, layers=2, target=0.1) if quick else TaskShape()
        done = measure_runs(shape, seeds=1 if quick else seeds, trl_threads=(1,) if quick else (1, 2))
        found["end_to_end"] = {key: value for key, value in done.items() if key != "time_to_reward_ratio"}
        found["time_to_reward_ratio"] = done["time_to_reward_ratio"]
    return found


def bars(found: Mapping[str, Any]) -> dict[str, bool]:
    """Which bars were met, of the parts that were measured."""
    met: dict[str, bool] = {}
    if "train_only" in found:
        met[f"train_only.ratio_vs_trl >= {TRAIN_BAR}"] = found["train_only"]["ratio_vs_trl"] >= TRAIN_BAR
        met["peak_memory_ratio <= 1"] = found["peak_memory_ratio"] <= 1.0
    if "head" in found:
        met[f"head.peak_ratio_vs_naive <= {HEAD_PEAK_BAR}"] = found["head"]["peak_ratio_vs_naive"] <= HEAD_PEAK_BAR
        met[f"head.speed_ratio_vs_naive >= {HEAD_SPEED_BAR}"] = found["head"]["speed_ratio_vs_naive"] >= HEAD_SPEED_BAR
    if "end_to_end" in found:
        reached = found["time_to_reward_ratio"]
        met[f"end_to_end.ratio_vs_trl >= {RUN_BAR}"] = found["end_to_end"]["ratio_vs_trl"] >= RUN_BAR
        met["time_to_reward_ratio <= 1"] = reached is not None and reached <= 1.0
    return met


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trainer", description="Our trainer against TRL's.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, its figures mean nothing")
    parser.add_argument("--seeds", type=int, default=2, help="whole trainings of each system")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    found = measure(options.only, quick=options.quick, seeds=options.seeds)
    report = {
        "bench": "trainer",
        **found,
        "trl": trainer_trl_environment.TRL,
        "trl_settings": TRL_SETTINGS,
        "quick": options.quick,
        "bars": bars(found),
        "elapsed_s": round(time.monotonic() - started, 1),
        "machine": describe_machine(),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
