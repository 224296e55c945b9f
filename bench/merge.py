"""One row per turn, merged timelines and prefix trees on agent episodes: ``python -m bench.merge [--quick]``.

The three train the same tokens and must have the same gradient.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.recorded import SHAPES, merged_batch, num_tokens, num_trained, record_group, turn_rows_batch
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
from wingbeat.core.samples import TrainingBatch
from wingbeat.tracking import ChatTemplate, EpisodeGraph

MERGED_BAR = 4.0
"""Of shape single."""
TREE_BAR, TREE_GOAL = 0.5, 0.7
"""Speedup of the tree as a share of the tokens that it saves."""
DESCRIPTION = (
    "CPU seconds of one optimiser step, least of the repeats, one thread, float32, of {model} with random weights. "
    "Each shape is one group of {episodes} agent episodes of one task, through our chat template and token graph. "
    "rows: one row per turn, its whole prompt and its reply. merged: one row per timeline. Both are causal batches of "
    "rows of nearly one length, without a mask. tree: the timelines over their prefix tree. tokens_*: forwarded in a "
    "step, without padding. speedup_*: against rows. efficiency_tree: speedup_tree / (tokens_rows / tokens_tree). "
    "grad_rel_err: relative L2 distance of merged and tree gradients from those of rows, the worse; in float64 by a "
    "model of 2 layers of size 64 on 2 episodes."
)


def systems(folder: Path, graphs: list[EpisodeGraph], *, dtype: torch.dtype = torch.float32) -> dict[str, Trained]:
    """The three ways to train the same tokens."""
    rows, merged = turn_rows_batch(graphs), merged_batch(graphs)
    if num_trained(rows) != num_trained(merged):
        raise RuntimeError(f"rows train {num_trained(rows)} tokens, timelines {num_trained(merged)}: not comparable")
    ways: dict[str, tuple[TrainingBatch, Settings]] = {
        "rows": (rows, ROWS),
        "merged": (merged, ROWS),
        "tree": (merged, TREE),
    }
    return {
        name: Trained(folder, batch=batch, settings=settings, dtype=dtype) for name, (batch, settings) in ways.items()
    }


def measure(folder: Path, graphs: list[EpisodeGraph], *, repeats: int) -> dict[str, Any]:
    """One shape: the first step of each gives its gradient and is the first of its measurements."""
    trained = systems(folder, graphs)
    first = {name: system.step_s() for name, system in trained.items()}
    gradients = {name: system.gradient() for name, system in trained.items()}
    later = least_times({name: system.step_s for name, system in trained.items()}, repeats=repeats - 1)
    times = {name: min(taken, later.get(name, taken)) for name, taken in first.items()}
    tokens = {name: system.forward_tokens for name, system in trained.items()}
    speedup = {name: times["rows"] / times[name] for name in ("merged", "tree")}
    merged = merged_batch(graphs)
    return {
        **{f"tokens_{name}": count for name, count in tokens.items()},
        **{f"time_{name}_s": round(taken, 3) for name, taken in times.items()},
        **{f"speedup_{name}": round(ratio, 3) for name, ratio in speedup.items()},
        "efficiency_tree": round(speedup["tree"] * tokens["tree"] / tokens["rows"], 3),
        "grad_rel_err": worst_error(gradients["rows"], [gradients["merged"], gradients["tree"]]),
        "trained_tokens": num_trained(merged),
        "turns": sum(graph.num_turns for graph in graphs),
        "timelines": sum(len(episode.samples) for episode in merged.episodes),
        "tokens_timelines": num_tokens(merged),
    }


def float64_error(folder: Path, graphs: list[EpisodeGraph]) -> float:
    trained = systems(folder, graphs, dtype=torch.float64)
    for system in trained.values():
        system.step_s()
    gradients = {name: system.gradient() for name, system in trained.items()}
    return worst_error(gradients["rows"], [gradients["merged"], gradients["tree"]])


def run(*, quick: bool, repeats: int, episodes: int) -> dict[str, Any]:
    size = SMALL if quick else ModelSize()
    started = time.perf_counter()
    shapes: dict[str, dict[str, Any]] = {}
    with model_folder(size) as folder, model_folder(SMALL) as small:
        template = ChatTemplate.load(folder)
        for name in SHAPES:
            graphs = record_group(name, episodes=episodes, seed=1, template=template)
            shapes[name] = measure(folder, graphs, repeats=repeats)
            few = record_group(name, episodes=2, seed=2, template=template)
            shapes[name]["grad_rel_err_float64"] = float64_error(small, few)
            sys.stderr.write(f"{name}: {json.dumps(shapes[name])}\n")
    return {
        "description": DESCRIPTION.format(model=size.describe(), episodes=episodes),
        "shapes": shapes,
        "bars": bars(shapes),
        "quick": quick,
        "repeats": repeats,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }


def bars(shapes: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Whether each bar holds in this run."""
    found = shapes.values()
    return {
        f"single speedup_merged >= {MERGED_BAR}": shapes["single"]["speedup_merged"] >= MERGED_BAR,
        "speedup_tree >= speedup_merged": all(s["speedup_tree"] >= s["speedup_merged"] for s in found),
        f"efficiency_tree >= {TREE_BAR}": all(s["efficiency_tree"] >= TREE_BAR for s in found),
        f"efficiency_tree >= {TREE_GOAL} (goal)": all(s["efficiency_tree"] >= TREE_GOAL for s in found),
        "grad_rel_err <= 1e-5": all(s["grad_rel_err"] <= 1e-5 for s in found),
        "grad_rel_err_float64 <= 1e-12": all(s["grad_rel_err_float64"] <= 1e-12 for s in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: a tiny model, 2 episodes, measured once")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each; the least counts")
    parser.add_argument("--episodes", type=int, default=4, help="episodes of a group")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quick: bool = arguments.quick
    summary = run(quick=quick, repeats=1 if quick else arguments.repeats, episodes=2 if quick else arguments.episodes)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
