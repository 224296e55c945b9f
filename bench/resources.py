"""Turns, sandboxes and their failures: ``python -m bench.resources [--quick] [--only pool boxes chaos]``.

pool: 2,048 who want one of 64 pooled objects, each for a millisecond, 10,000 times in all, beside an ideal line of
bare futures.  boxes: sandboxes through 16 slots, each running a short program, beside what their start-up allows, and
episodes with and without fetching ahead.  chaos: sandboxes that hang, are killed or are left dirty.  The last line of
output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from bench.machine import describe_machine
from bench.resources_boxes import boxes
from bench.resources_chaos import chaos
from bench.resources_pool import pool

PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {"pool": pool, "boxes": boxes, "chaos": chaos}
KEYS = {
    "pool": ("pool_time_vs_ideal",),
    "boxes": ("sandbox_vs_limit", "prefetch_gain"),
    "chaos": ("leaked", "dirty_reuse", "lost", "infra_as_reward", "throughput_vs_calm"),
}
"""What each part answers with; a figure that is missing must not take its bar along."""
AT_MOST = {"pool_time_vs_ideal": 1.5, "leaked": 0, "dirty_reuse": 0, "lost": 0, "infra_as_reward": 0}
AT_LEAST = {"sandbox_vs_limit": 0.8, "throughput_vs_calm": 0.6}


def bars(summary: dict[str, Any]) -> dict[str, bool]:
    """Of the parts that were run.

    A quick run of the last part is not judged by its throughput: one sandbox that hangs at its end is half of it.
    """
    judged = {**AT_LEAST}
    if summary.get("quick"):
        del judged["throughput_vs_calm"]
    most = {f"{name} <= {bar}": summary[name] <= bar for name, bar in AT_MOST.items() if name in summary}
    least = {f"{name} >= {bar}": summary[name] >= bar for name, bar in judged.items() if name in summary}
    return {**most, **least}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.resources", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: fewer of everything, no bar counts")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="these parts")
    arguments = parser.parse_args()
    summary: dict[str, Any] = {"benchmark": "resources", "machine": describe_machine(), "quick": arguments.quick}
    for name in arguments.only:
        sys.stdout.write(f"{name} ...\n")
        sys.stdout.flush()
        figures = PARTS[name](arguments.quick)
        assert not (missing := set(KEYS[name]) - set(figures)), f"{name} does not tell {missing}"
        summary.update(figures)
    summary["bars"] = bars(summary)
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.exit(0 if arguments.quick or all(summary["bars"].values()) else 1)


if __name__ == "__main__":
    main()
