"""A group's replies to one prompt, as causal rows and as a prefix tree: ``python -m bench.tree [--quick]``.

The baseline forwards the merged rows as one causal batch of equal lengths, without a mask.  Memory is measured in
a fresh process for each way.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.machine import status_kib
from bench.recorded import LOGPROB_NOISE, POLICY, VOCABULARY
from bench.training import (
    ROWS,
    SMALL,
    TREE,
    ModelSize,
    Settings,
    Trained,
    least_times,
    machine,
    model_folder,
    worst_error,
)
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample

MEMBERS = 8
PROMPT_PER_REPLY = 8
REPLY_TOKENS, QUICK_REPLY_TOKENS = 128, 48
SPEEDUP_BAR, NO_SHARING_BAR = 2.5, 0.97
PACKED: Settings = {"prefix_tree": "off", "sequence_packing": "off"}
"""All rows in one forward."""
SHARING: dict[str, Settings] = {
    "tree": TREE,
    "depth_first": {"prefix_tree": "on", "prefix_tree_backend": "depth_first", "micro_batch_tokens": 1},
}
"""The budget of depth_first lets no two replies be alive at once."""
WAYS = {"packed": PACKED, **SHARING}
"""What memory is compared of."""
DESCRIPTION = (
    "CPU seconds of one optimiser step, least of the repeats, one thread, float32, of {model} with random weights, on "
    "a group of 8 replies of {reply} tokens to one prompt of 8 times as many. packed: the 8 rows as causal batches of "
    "one length without a mask, the faster of all at once and of at most 4096 tokens at once. ratio_at_no_sharing: the "
    "same rows with nothing in common, trees switched off against prefix_tree = auto; *_forced: against "
    "prefix_tree = on. peak_memory_ratio: growth of the resident set's peak by a step in a fresh process, tree against "
    "packed at once; *_depth_first: one path at a time against packed at once. grad_rel_err: relative L2 distance of "
    "the gradients of tree and depth_first from that of the rows, the worse; in float64 by a model of 2 layers of size "
    "64."
)


def group_batch(*, reply_tokens: int, shared: bool) -> TrainingBatch:
    """Random tokens; every reply trains whole.  Without sharing the members' prompts differ from the first token."""
    rng = np.random.default_rng(0)
    prompt_tokens = PROMPT_PER_REPLY * reply_tokens
    length = prompt_tokens + reply_tokens
    prompt = rng.integers(0, VOCABULARY, prompt_tokens)
    episodes: list[EpisodeSamples] = []
    sampled = np.arange(length) >= prompt_tokens
    for member in range(MEMBERS):
        start = prompt if shared else np.append(member, rng.integers(0, VOCABULARY, prompt_tokens - 1))
        logprobs = rng.normal(-math.log(VOCABULARY), LOGPROB_NOISE, length)
        sample = TrainingSample.build(
            f"s{member}",
            token_ids=np.append(start, rng.integers(0, VOCABULARY, reply_tokens)).astype(np.int32),
            sampled=sampled.astype(np.uint8),
            sampling_logprobs=np.where(sampled, logprobs, 0.0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
        )
        episodes.append(EpisodeSamples(f"e{member}", 1, "group", POLICY, "", float(member % 2), (sample,)))
    return TrainingBatch(batch_id="group", policy=POLICY, step=1, episodes=tuple(episodes), seed=0)


def shared_times(folder: Path, *, reply_tokens: int, repeats: int) -> dict[str, Any]:
    """The group: times, and the tree's gradient against that of rows."""
    batch = group_batch(reply_tokens=reply_tokens, shared=True)
    trained = {
        name: Trained(folder, batch=batch, settings=settings)
        for name, settings in {"packed_at_once": PACKED, "packed_in_parts": ROWS, **SHARING}.items()
    }
    first = {name: system.step_s() for name, system in trained.items()}
    gradients = {name: system.gradient() for name, system in trained.items()}
    error = worst_error(gradients["packed_in_parts"], [gradients[name] for name in SHARING])
    later = least_times({name: system.step_s for name, system in trained.items()}, repeats=repeats - 1)
    times = {name: min(taken, later.get(name, taken)) for name, taken in first.items()}
    tokens = {name: system.forward_tokens for name, system in trained.items()}
    packed = min(times["packed_at_once"], times["packed_in_parts"])
    sharing = tokens["packed_at_once"] / tokens["tree"]
    return {
        "speedup_over_packed": round(packed / times["tree"], 3),
        "speedup_depth_first": round(packed / times["depth_first"], 3),
        "efficiency": round(packed / times["tree"] / sharing, 3),
        "grad_rel_err": error,
        "tokens": tokens,
        "times_s": {name: round(taken, 3) for name, taken in times.items()},
    }


def unshared_times(folder: Path, *, reply_tokens: int, repeats: int) -> dict[str, Any]:
    """Rows with nothing in common: what looking for a tree costs, and what a forced one does."""
    batch = group_batch(reply_tokens=reply_tokens, shared=False)
    settings: dict[str, Settings] = {
        "off": ROWS,
        "auto": {**ROWS, "prefix_tree": "auto"},
        "on": {**ROWS, "prefix_tree": "on"},
    }
    trained = {name: Trained(folder, batch=batch, settings=value) for name, value in settings.items()}
    times = least_times({name: system.step_s for name, system in trained.items()}, repeats=repeats)
    return {
        "ratio_at_no_sharing": round(times["off"] / times["auto"], 3),
        "ratio_at_no_sharing_forced": round(times["off"] / times["on"], 3),
        "times_at_no_sharing_s": {name: round(taken, 3) for name, taken in times.items()},
    }


def float64_error(folder: Path) -> float:
    batch = group_batch(reply_tokens=QUICK_REPLY_TOKENS, shared=True)
    gradients: list[dict[str, torch.Tensor]] = []
    for settings in (ROWS, *SHARING.values()):
        trained = Trained(folder, batch=batch, settings=settings, dtype=torch.float64)
        trained.step_s()
        gradients.append(trained.gradient())
    return worst_error(gradients[0], gradients[1:])


def peak_growth_kib(way: str, *, size: ModelSize, reply_tokens: int) -> int:
    """How far a step raises this process's resident set; a step on tiny rows has brought all else into memory before.

    Linux only: the peak is reset first, because imports have peaks of their own.
    """
    with model_folder(size) as folder:
        Trained(folder, batch=group_batch(reply_tokens=2, shared=True), settings=WAYS[way]).step_s()
        trained = Trained(folder, batch=group_batch(reply_tokens=reply_tokens, shared=True), settings=WAYS[way])
        Path("/proc/self/clear_refs").write_text("5")
        before = status_kib("VmRSS")
        trained.step_s()
        return max(1, status_kib("VmHWM") - before)


def memory(*, quick: bool) -> dict[str, Any]:
    """Peaks in fresh processes."""
    peaks: dict[str, int] = {}
    for way in WAYS:
        command = [sys.executable, "-m", "bench.tree", "--peak-of", way, *(["--quick"] if quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks[way] = json.loads(done.stdout.splitlines()[-1])
        sys.stderr.write(f"peak of {way}: {peaks[way] / 1024:.0f} MiB\n")
    return {
        "peak_memory_ratio": round(peaks["tree"] / peaks["packed"], 3),
        "peak_memory_ratio_depth_first": round(peaks["depth_first"] / peaks["packed"], 3),
        "peak_growth_mib": {way: round(peak / 1024, 1) for way, peak in peaks.items()},
    }


def run(*, quick: bool, repeats: int) -> dict[str, Any]:
    size, reply_tokens = (SMALL, QUICK_REPLY_TOKENS) if quick else (ModelSize(), REPLY_TOKENS)
    started = time.perf_counter()
    with model_folder(size) as folder, model_folder(SMALL) as small:
        found = shared_times(folder, reply_tokens=reply_tokens, repeats=repeats)
        found |= unshared_times(folder, reply_tokens=reply_tokens, repeats=repeats)
        found["grad_rel_err_float64"] = float64_error(small)
    found |= memory(quick=quick)
    return {
        "description": DESCRIPTION.format(model=size.describe(), reply=reply_tokens),
        **found,
        "bars": {
            f"speedup_over_packed >= {SPEEDUP_BAR}": found["speedup_over_packed"] >= SPEEDUP_BAR,
            f"ratio_at_no_sharing >= {NO_SHARING_BAR}": found["ratio_at_no_sharing"] >= NO_SHARING_BAR,
            "grad_rel_err <= 1e-5": found["grad_rel_err"] <= 1e-5,
            "grad_rel_err_float64 <= 1e-12": found["grad_rel_err_float64"] <= 1e-12,
        },
        "quick": quick,
        "repeats": repeats,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tree", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: a tiny model, short replies, measured once")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each; the least counts")
    parser.add_argument("--peak-of", choices=list(WAYS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quick: bool = arguments.quick
    if arguments.peak_of:
        size, reply_tokens = (SMALL, QUICK_REPLY_TOKENS) if quick else (ModelSize(), REPLY_TOKENS)
        sys.stdout.write(f"{peak_growth_kib(arguments.peak_of, size=size, reply_tokens=reply_tokens)}\n")
        return
    summary = run(quick=quick, repeats=1 if quick else arguments.repeats)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
