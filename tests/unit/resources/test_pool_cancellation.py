"""A lease cancelled at any of its awaits leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from cutting import Cut
from fake_backend import FakeBackend, Thing, failing, fake

from wingbeat.core.errors import WingbeatError
from wingbeat.resources import Budgets, Needs, Resources, Reuse

MAX_AWAITS = 200
NEEDS = Needs(cpus=1)


async def one(pool: Resources) -> None:
    async with pool.lease(fake(limit=1, needs=NEEDS), name="it", owner="e") as lease:
        lease.value.dirt.append("dirt")
        await asyncio.sleep(0)


async def never(pool: Resources) -> None:
    async with pool.lease(fake(reuse=Reuse.NEVER, limit=1, needs=NEEDS)):
        await asyncio.sleep(0)


async def shared(pool: Resources) -> None:
    spec = fake(reuse=Reuse.SHARED, needs=NEEDS)
    async with pool.lease(spec), pool.lease(spec):
        await asyncio.sleep(0)


async def twice(pool: Resources) -> None:
    """From idle, with its check."""
    await one(pool)
    await one(pool)


async def again_under_one_name(pool: Resources) -> None:
    spec = fake(limit=1)
    async with pool.lease(spec, name="it", owner="e"), pool.lease(spec, name="it", owner="e"):
        await asyncio.sleep(0)


async def several(pool: Resources) -> None:
    async with pool.lease_all({"a": fake(word="a", limit=1), "b": fake(word="b", needs=NEEDS)}, owner="e"):
        await asyncio.sleep(0)


async def fetched(pool: Resources) -> None:
    try:
        pool.prefetch({"a": fake(word="a", limit=1), "b": fake(word="b", needs=NEEDS)}, owner="f")
        async with pool.lease(fake(word="b", needs=NEEDS), name="b", owner="f"):
            await asyncio.sleep(0)
    finally:
        await pool.release_owner("f")


async def replaced(pool: Resources) -> None:
    await one(pool)
    thing = next(iter(backend_of(pool).alive.values()))
    thing.is_alive = False
    await one(pool)


async def broken(pool: Resources) -> None:
    backend = backend_of(pool)
    backend.at("reset", failing(RuntimeError("no")))
    backend.at("close", failing(RuntimeError("neither")))
    await one(pool)
    backend.alive.clear()


async def making_room(pool: Resources) -> None:
    for word in "abcd":
        async with pool.lease(fake(word=word, needs=NEEDS)):
            pass
    async with pool.lease(fake(word="big", needs=Needs(cpus=4))):
        await asyncio.sleep(0)


def backend_of(pool: Resources) -> FakeBackend:
    backend = pool._backends["fake"]  # pyright: ignore[reportPrivateUsage]
    assert isinstance(backend, FakeBackend)
    return backend


SCENES = [one, never, shared, twice, again_under_one_name, several, fetched, replaced, broken, making_room]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("with_others", [False, True], ids=["alone", "in-line"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_cancelled_at_every_await_nothing_leaks(
    scene: Callable[[Resources], Awaitable[None]], with_others: bool, late: bool, tmp_path: Path
) -> None:
    for at in range(MAX_AWAITS):
        cut = await _cut_once(scene, at, tmp_path, with_others=with_others, late=late)
        if cut.num_awaits <= at:
            return
    raise AssertionError("more awaits than expected")


async def _cut_once(
    scene: Callable[[Resources], Awaitable[None]], at: int, ledger: Path, *, with_others: bool, late: bool
) -> Cut:
    backend = FakeBackend()
    async with asyncio.timeout(10), Resources(Budgets(cpus=4), backends={"fake": backend}, ledger=ledger) as pool:
        others = [asyncio.create_task(one(pool)), asyncio.create_task(making_room(pool))] if with_others else []
        cut = Cut(scene(pool), at, late=late)  # pyright: ignore[reportArgumentType]
        (result,) = await asyncio.gather(asyncio.create_task(cut.run()), return_exceptions=True)
        assert result is None or isinstance(result, asyncio.CancelledError | WingbeatError), result
        results = await asyncio.gather(*others, return_exceptions=True)
        assert [error for error in results if isinstance(error, BaseException)] == [], "others are not disturbed"
        backend.steps.clear()
        await making_room(pool)  # all budgets can be had
        await one(pool)
        assert pool.num_leases == 0
    assert [thing for thing in backend.alive.values() if not _was_given_up(thing)] == []
    assert all(thing.num_closes == 1 for thing in backend.made if thing.num_closes or thing.num_resets)
    for stats in pool.snapshot():
        assert (stats.live, stats.leased, stats.waiting, stats.idle) == (0, 0, 0, 0)
    for budget in pool.budgets():
        assert (budget.used, budget.waiting) == (0, 0)
    return cut


def _was_given_up(thing: Thing) -> bool:
    """Its close failed, which is counted as a leak."""
    return thing.num_closes > 0
