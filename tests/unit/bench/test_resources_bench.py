"""``python -m bench.resources`` measures turns, and says which bars its parts met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.resources import AT_LEAST, AT_MOST, KEYS, bars

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_turns_are_measured_and_the_last_line_is_json() -> None:
    command = [sys.executable, "-m", "bench.resources", "--quick", "--only", "pool"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["pool_time_vs_ideal"] >= 1.0
    assert summary["pool_ideal_s"] >= summary["pool_leases"] / summary["pool_slots"] * summary["pool_hold_s"]
    assert list(summary["bars"]) == ["pool_time_vs_ideal <= 1.5"]


def test_bars_are_of_the_parts_that_were_run() -> None:
    assert bars({}) == {}
    assert bars({"leaked": 0, "throughput_vs_calm": 0.4, "quick": True}) == {"leaked <= 0": True}
    assert bars({"leaked": 1, "throughput_vs_calm": 0.7}) == {"leaked <= 0": False, "throughput_vs_calm >= 0.6": True}


def test_every_bar_is_of_a_figure_that_its_part_must_tell() -> None:
    told = [key for keys in KEYS.values() for key in keys]
    assert {*AT_MOST, *AT_LEAST} == {*told} - {"prefetch_gain"}
    assert (AT_MOST["pool_time_vs_ideal"], AT_LEAST) == (1.5, {"sandbox_vs_limit": 0.8, "throughput_vs_calm": 0.6})
    assert [AT_MOST[key] for key in ("leaked", "dirty_reuse", "lost", "infra_as_reward")] == [0] * 4
