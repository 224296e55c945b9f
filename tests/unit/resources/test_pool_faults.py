"""Faults of what a pool runs that must neither hang a lease nor cost the pool a place for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend, failing, fake, held

from wingbeat.core.errors import ConfigError, SetupError
from wingbeat.resources import Budgets, LocalSpec, Needs, ResourceFailed, Resources, ResourceWait, Reuse


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def pool(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[Resources]:
    budgets = Budgets(cpus=4, cost={"judge": 10.0}, requests_per_minute={"judge": 60})
    async with Resources(budgets, backends={"fake": backend}, ledger=tmp_path) as resources:
        yield resources
    assert [(stats.live, stats.leased) for stats in resources.snapshot()] == [(0, 0)]


def _awaits_what_was_cancelled() -> Any:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


FAULTS = [
    failing(SetupError("a person has to put this right")),
    failing(SystemExit(3)),  # pyright: ignore[reportArgumentType]
    _awaits_what_was_cancelled,
]


@pytest.mark.parametrize("fault", FAULTS, ids=["setup", "exit", "cancelled"])
@pytest.mark.parametrize("step", ["reset", "check", "close"])
async def test_whatever_a_hook_raises_its_place_comes_back(
    step: str, fault: Callable[[], Any], pool: Resources, backend: FakeBackend
) -> None:
    spec = fake(limit=1)
    async with pool.lease(spec):
        backend.at(step, fault)
        if step == "close":
            backend.at("reset", failing(RuntimeError("no")))
    async with asyncio.timeout(5), pool.lease(spec) as lease:
        assert lease.value.number == 1


@pytest.mark.parametrize("fault", FAULTS, ids=["setup", "exit", "cancelled"])
async def test_whatever_a_check_before_a_lease_raises_another_one_is_lent(
    fault: Callable[[], Any], pool: Resources, backend: FakeBackend
) -> None:
    async with pool.lease(fake(limit=1)):
        pass
    backend.at("check", fault)
    async with asyncio.timeout(5), pool.lease(fake(limit=1)) as lease:
        assert lease.value.number == 1


@pytest.mark.parametrize("fault", FAULTS[1:], ids=["exit", "cancelled"])
async def test_whatever_a_start_raises_is_a_failure_of_infrastructure(
    fault: Callable[[], Any], pool: Resources, backend: FakeBackend
) -> None:
    backend.at("start", fault)
    with pytest.raises(ResourceFailed):
        async with pool.lease(fake(limit=1)):
            raise AssertionError("it never started")
    assert pool.snapshot()[0].start_failures == 1


async def test_what_was_fetched_ahead_and_died_unused_is_not_lent(pool: Resources, backend: FakeBackend) -> None:
    spec = fake(limit=1)
    pool.prefetch(spec, owner="a")
    other = asyncio.create_task(_number(pool, spec))
    await soon()
    backend.made[0].is_alive = False
    await pool.release_owner("a")
    assert await asyncio.wait_for(other, 5) == 1


async def soon() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def _number(pool: Resources, spec: Any) -> int:
    async with pool.lease(spec) as lease:
        return lease.value.number


async def test_who_comes_while_a_shared_one_is_replaced_joins_the_next(pool: Resources, backend: FakeBackend) -> None:
    spec = fake(reuse=Reuse.SHARED, limit=1)
    async with pool.lease(spec):
        pass
    backend.made[0].is_alive = False
    closing = asyncio.Event()
    backend.at("close", held(closing))
    done = asyncio.Event()

    async def use() -> int:
        async with pool.lease(spec) as lease:
            await done.wait()
            return lease.value.number

    first = asyncio.create_task(use())
    await soon()
    assert backend.made[0].num_closes == 1
    second = asyncio.create_task(_number(pool, spec))
    await asyncio.sleep(0)
    closing.set()
    assert await asyncio.wait_for(second, 5) == 1, "it does not wait until all others have left"
    done.set()
    assert await first == 1


async def test_money_that_is_spent_meanwhile_ends_the_wait(pool: Resources, backend: FakeBackend) -> None:
    """What it lacks never comes back, and it would keep those behind it waiting."""
    spec = fake(limit=1, draw={"budget": "judge", "cost": 3.0})
    async with asyncio.timeout(5):
        async with pool.lease(spec):
            expensive = asyncio.create_task(_number(pool, spec))
            cheap = asyncio.create_task(_number(pool, fake(draw={"budget": "judge", "cost": 1.0})))
            await asyncio.sleep(0)
            pool._instances.meters.settle("judge", cost=6.0)
            with pytest.raises(ResourceFailed, match=r"cost.judge: 9 of 10 are spent, so 3 more cannot be had"):
                await expensive
        await cheap
        with pytest.raises(ResourceFailed, match="are spent"):
            await pool._instances.meters.take("judge", cost=1.0)


async def test_who_draws_money_waits_no_longer_than_there_is_some(pool: Resources) -> None:
    meters = pool._instances.meters
    async with asyncio.timeout(5):
        await meters.take("judge", requests=60, cost=1.0)
        waiting = asyncio.create_task(meters.take("judge", requests=60, cost=5.0))
        await asyncio.sleep(0)
        meters.settle("judge", cost=8.0)
        with pytest.raises(ResourceFailed, match="are spent"):
            await waiting
        async with pool.lease(fake()):  # for the fixture
            pass


async def test_what_is_no_spec_is_named(pool: Resources) -> None:
    with pytest.raises(ConfigError, match=r"expected a spec, got dict; parse_spec\(data\) makes one"):
        pool.lease({"kind": "sandbox"})  # pyright: ignore[reportArgumentType]
    async with pool.lease(fake()):
        pass


def test_a_hook_may_wait_for_what_was_cancelled_and_the_object_is_replaced(tmp_path: Path) -> None:
    """In-process objects, whose hooks users write."""

    async def play() -> tuple[int, int]:
        made = list[list[int]]()

        def make() -> list[int]:
            made.append([len(made)])
            return made[-1]

        async def reset(thing: list[int]) -> None:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

        spec = LocalSpec(factory=make, reset=reset, reuse=Reuse.AFTER_RESET, limit=1)
        async with asyncio.timeout(5), Resources(Budgets(), ledger=tmp_path) as pool:
            for _ in range(2):
                async with pool.lease(spec):
                    pass
            return len(made), pool.snapshot()[0].quarantined

    assert asyncio.run(play()) == (2, 2)


async def test_who_gives_up_leaves_nothing_in_the_books(pool: Resources) -> None:
    """Each task has another spec: kept for as long as the pool lives, they would add up."""
    async with pool.lease(fake(word="has it all", needs=Needs(cpus=4))):
        with pytest.raises(ResourceWait):
            async with pool.lease(fake(word="waits", needs=Needs(cpus=1)), wait_s=0.001):
                raise AssertionError("there is no room")
        assert len(pool._admission.books) == 1


async def test_room_is_not_made_by_closing_what_is_asked_for(pool: Resources, backend: FakeBackend) -> None:
    wanted, other = fake(word="wanted", needs=Needs(cpus=2)), fake(word="other", needs=Needs(cpus=2))
    for spec in (wanted, other):
        async with pool.lease(spec):
            pass
    async with pool.lease_all({"wanted": wanted, "new": fake(word="new", needs=Needs(cpus=2))}) as leases:
        assert (leases["wanted"].value.number, leases["new"].value.number) == (0, 2)


async def test_who_is_refused_leaves_nothing_in_the_books(pool: Resources) -> None:
    pool._instances.meters.settle("judge", cost=10.0)
    with pytest.raises(ResourceFailed, match="are spent"):
        async with pool.lease(fake(draw={"budget": "judge", "cost": 1.0})):
            raise AssertionError("there is no money")
    assert pool._admission.books == {}
    async with pool.lease(fake()):  # for the fixture
        pass


async def test_what_is_being_cleaned_as_the_pool_closes_is_closed(backend: FakeBackend, tmp_path: Path) -> None:
    pool = Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path)
    cleaned = asyncio.Event()
    backend.at("reset", held(cleaned))
    lease = asyncio.create_task(_number(pool, fake()))
    await soon()
    closing = asyncio.create_task(pool.close())
    await soon()
    cleaned.set()
    await asyncio.wait_for(closing, 5)
    await lease
    assert backend.alive == {}


async def test_who_comes_while_a_shared_start_is_given_up_gets_another(pool: Resources, backend: FakeBackend) -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await ended.wait()

    spec = fake(reuse=Reuse.SHARED)
    backend.at("start", hang)
    first = asyncio.create_task(_number(pool, spec))
    await soon()
    first.cancel()
    await soon()
    assert await asyncio.wait_for(_number(pool, spec), 5) == 1
    ended.set()
    with pytest.raises(asyncio.CancelledError):
        await first
