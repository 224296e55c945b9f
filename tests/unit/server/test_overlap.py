"""The overlap meter by hand."""

from __future__ import annotations

from typing import Any

from wingbeat.server.overlap import OverlapMeter


def test_overlap_is_the_share_of_training_time_in_which_something_was_generated(clock: Any) -> None:
    clock.now = 100.0
    meter = OverlapMeter(clock)
    assert meter.fraction == 0.0
    clock.now = 110.0  # 10 s of nothing
    meter.training(+1)
    clock.now = 112.0  # 2 s training alone
    meter.generating(1)
    clock.now = 115.0  # 3 s both
    meter.generating(5)
    clock.now = 116.0  # 1 s both
    meter.generating(0)
    clock.now = 118.0  # 2 s training alone
    meter.training(-1)
    clock.now = 125.0
    meter.generating(2)
    clock.now = 130.0  # generating alone
    assert (meter.train_s, meter.both_s) == (8.0, 4.0)
    assert meter.fraction == 0.5


def test_two_policies_that_train_at_once_count_once_and_a_running_step_counts_already(clock: Any) -> None:
    meter = OverlapMeter(clock)
    meter.generating(1)
    meter.training(+1)
    meter.training(+1)
    clock.now = 4.0
    meter.training(-1)
    clock.now = 5.0
    assert meter.fraction == 1.0
    assert meter.train_s == 5.0
