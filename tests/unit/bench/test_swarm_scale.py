"""The swarm benchmark's arithmetic, and a small swarm from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.swarm_scale import CALLS, QUICK, Samples, measure, percentile, report, slope_mb_per_min

CLIENT: dict[str, Any] = {
    "calls": {"begin": [(30.0, 0.01)] * 98 + [(15.0, 9.0)], "finish": [(31.0, 0.2), (32.0, 0.3), (99.0, 9.0)]},
    "begun": 50,
    "acknowledged": [f"e{index}:1" for index in range(50)],
    "refused": 0,
    "cpu_s": 1.0,
}
SAMPLES = Samples(
    open_episodes=[10, 1004, 990], rss=[(float(s), 100.0 + s / 60) for s in range(120)], full_s=20.0, full=(20.0, 90.0)
)


def test_percentiles_and_slopes_by_hand() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(200)], 0.99) == 197.0
    assert slope_mb_per_min([(0.0, 5.0)], after_s=0) == 0.0
    assert slope_mb_per_min([(0.0, 900.0), (60.0, 10.0), (120.0, 13.0), (180.0, 16.0)], after_s=30) == pytest.approx(3)


def test_the_report_adds_up_and_judges() -> None:
    found = report([CLIENT, CLIENT], SAMPLES, missing=0, minutes=1.0)
    assert found["concurrent_peak"] == 1004
    assert (found["lost_episodes"], found["episodes"]) == (0, 100)
    assert found["control_p99_ms"] == 200.0
    assert found["with_ramp_p99_ms"] == 9000.0
    assert found["calls"] == {"lease": 0, "begin": 196, "finish": 4, "status": 0}
    assert found["rss_slope_mb_per_min"] == pytest.approx(1.0)
    assert "rss_slope_mb_per_min <= 5" not in found["bars"]
    assert report([CLIENT], SAMPLES, missing=0, minutes=10.0)["bars"]["rss_slope_mb_per_min <= 5"]


def test_an_episode_is_lost_if_it_was_not_acknowledged_or_not_kept() -> None:
    unacknowledged = CLIENT | {"acknowledged": CLIENT["acknowledged"][1:]}
    found = report([CLIENT, unacknowledged], SAMPLES, missing=2, minutes=1.0)
    assert found["lost_episodes"] == 3
    assert not found["bars"]["lost_episodes = 0"]


@pytest.mark.slow
def test_a_small_swarm_loses_nothing(tmp_path: Path) -> None:
    found = measure(QUICK, seed=0, folder=tmp_path)
    assert found["lost_episodes"] == 0
    assert 20 <= found["concurrent_peak"] <= 22
    assert found["episodes"] > 0
    assert min(found["calls"][call] for call in CALLS if call != "status") > 0
    assert found["rss_mb"] > 20
