"""The gateway benchmark end to end, without LiteLLM: both ways answer rightly, and every promised key is there."""

from __future__ import annotations

from pathlib import Path

import uvloop

from bench.gateway import STREAMED, WHOLE, Round, measure
from bench.gateway_report import report
from bench.gateway_targets import our_targets


def test_both_ways_are_measured(tmp_path: Path):
    rounds = [Round(4, n, 1, parts, 0) for n in (1, 32) for parts in (WHOLE, STREAMED)]
    with our_targets(tmp_path) as targets:
        bench = uvloop.run(measure(targets, rounds))
    result = report(bench.results, bench.first_turns, quick=True, elapsed_s=0.0)
    assert set(result["all"]) == {f"4kb.c{n}.{kind}" for n in (1, 32) for kind in ("whole", "stream")}
    assert set(result["c1"]) == {"added_p50_ms", "added_p99_ms"}
    assert result["rps"] > 0 and result["cpu_us_per_request"] > 0 and result["rps_ratio_vs_litellm"] is None
    for ways in result["all"].values():
        assert ways["direct"]["errors"] == ways["ours"]["errors"] == 0
        assert ways["ours"]["added_p50_ms"] > 0
    assert result["all"]["4kb.c32.whole"]["ours"]["requests"] == 32 * 8
