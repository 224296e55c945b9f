"""A broadcast that misses nobody."""

from __future__ import annotations

import asyncio

import pytest

from wingbeat.core.signals import Changed


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


async def test_a_notice_between_the_call_and_its_await_is_not_lost() -> None:
    """As where the wait runs in a task of its own, which begins a turn of the loop later."""
    changed = Changed()
    waiter = asyncio.create_task(changed.wait(60.0))
    changed.notify()
    changed.notify()
    assert await asyncio.wait_for(waiter, 5)
    assert changed.count == 2
