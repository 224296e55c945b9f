"""The gateway benchmark's figures, and the JSON object that they end in."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.machine import describe_machine

P50_BAR_MS, P99_BAR_MS, RATIO_BAR = 1.0, 5.0, 5.0
WARM_UP = -1
"""The repeat that does not count."""
DESCRIPTION = (
    "Chat completions of a mock engine that answers at once (about 30 tokens): at its own endpoint (direct), through "
    "control over the worker protocol (ours: authenticated training episodes, token graph, every turn captured durably "
    "before its answer leaves, finished with a reward), and through LiteLLM's proxy in front of the direct endpoint "
    "(one worker process, no database, no callbacks). Second and later turns of conversations whose bodies have about "
    "so many KB; first turns, begin and finish are not timed. The ways take turns; every figure is the best of the "
    "repeats (lowest latency and CPU, highest rate); added is the difference of the best to direct. cpu is that of the "
    "proxy process, user and system, per request."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What a figure belongs to."""

    kb: int
    concurrency: int
    stream: bool

    def __str__(self) -> str:
        return f"{self.kb}kb.c{self.concurrency}.{'stream' if self.stream else 'whole'}"


@dataclass(slots=True)
class Figures:
    """Of one cell, one way and one repeat."""

    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    """What the load generator itself took."""
    errors: int = 0


Results = Mapping[tuple[Cell, str, int], Figures]
"""By cell, way and repeat."""
FirstTurns = Mapping[tuple[int, str], Sequence[float]]
"""Seconds by size in KB and way."""


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summarize(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """The best of the repeats by cell and way, and what each way adds to the direct one."""
    repeats: defaultdict[tuple[Cell, str], list[Figures]] = defaultdict(list)
    for (cell, name, repeat), figures in results.items():
        if repeat != WARM_UP and figures.latencies:
            repeats[cell, name].append(figures)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (cell, name), all_figures in repeats.items():
        table.setdefault(str(cell), {})[name] = {
            "p50_ms": min(1e3 * quantile(f.latencies, 0.5) for f in all_figures),
            "p99_ms": min(1e3 * quantile(f.latencies, 0.99) for f in all_figures),
            "first_byte_p50_ms": min(1e3 * quantile(f.first_bytes, 0.5) for f in all_figures),
            "rps": max(len(f.latencies) / f.elapsed_s for f in all_figures),
            "cpu_us_per_request": min(1e6 * f.cpu_s / len(f.latencies) for f in all_figures),
            "load_cpu_us_per_request": min(1e6 * f.load_cpu_s / len(f.latencies) for f in all_figures),
            "requests": sum(len(f.latencies) for f in all_figures),
            "errors": sum(f.errors for f in all_figures),
        }
    for ways in table.values():
        for name, figures in ways.items():
            if name != "direct":
                for key in ("p50_ms", "p99_ms", "first_byte_p50_ms"):
                    figures[f"added_{key}"] = figures[key] - ways["direct"][key]
    return table


def report(results: Results, first_turns: FirstTurns, *, quick: bool, elapsed_s: float) -> dict[str, Any]:
    """The JSON object: the compared figures, the bars, and everything else under ``all``."""
    table = summarize(results)
    single, many = table["4kb.c1.whole"], table["4kb.c32.whole"]
    ratio = many["ours"]["rps"] / many["litellm"]["rps"] if "litellm" in many else None
    p50, p99 = single["ours"]["added_p50_ms"], single["ours"]["added_p99_ms"]
    return _rounded(
        {
            "description": DESCRIPTION,
            "c1": {"added_p50_ms": p50, "added_p99_ms": p99},
            "rps": many["ours"]["rps"],
            "cpu_us_per_request": many["ours"]["cpu_us_per_request"],
            "rps_ratio_vs_litellm": ratio,
            "bars": {
                f"added p50 <= {P50_BAR_MS:g} ms at 1": p50 <= P50_BAR_MS,
                f"added p99 <= {P99_BAR_MS:g} ms at 1": p99 <= P99_BAR_MS,
                f"requests/s >= {RATIO_BAR:g} x LiteLLM's at 32": None if ratio is None else ratio >= RATIO_BAR,
            },
            "all": table,
            "first_turn_p50_ms": {
                f"{kb}kb": 1e3 * statistics.median(seconds)
                for (kb, name), seconds in first_turns.items()
                if name == "ours"
            },
            "quick": quick,
            "elapsed_s": elapsed_s,
            "machine": describe_machine(),
        }
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value
