"""The overlap meter by hand, and a broadcast that misses nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from wingbeat.core.signals import Changed
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


async def test_changed_wakes_all_who_wait_and_only_those() -> None:
    changed = Changed()
    async with asyncio.TaskGroup() as group:
        waiters = [group.create_task(changed.wait(60.0 if i % 2 else None)) for i in range(4)]
        await asyncio.sleep(0)
        changed.notify()
    assert [waiter.result() for waiter in waiters] == [True] * 4
    assert not await changed.wait(0.001)  # an earlier notification does not count


async def test_a_waiter_that_is_notified_and_cancelled_in_one_breath_is_cancelled() -> None:
    changed = Changed()
    waiter = asyncio.create_task(changed.wait(60.0))
    await asyncio.sleep(0)
    changed.notify()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
