"""The pool of in-process objects: reuse, limits, ends of all kinds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.ports import ResourceLease, ResourcePool
from wingbeat.resources import LocalSpec, ResourceFailed, Resources, ResourceState, Reuse
from wingbeat.resources.states import TRANSITIONS, advance


class Tool:
    """Counts what happens to it."""

    made: list[Tool]

    def __init__(self) -> None:
        self.num_resets = 0
        self.num_closes = 0
        self.healthy = True
        Tool.made.append(self)

    def reset(self) -> None:
        self.num_resets += 1

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.num_closes += 1


@pytest.fixture(autouse=True)
def fresh_tools() -> None:
    Tool.made = []


def fresh(limit: int | None = None) -> LocalSpec:
    return LocalSpec(factory=Tool, close=Tool.close, limit=limit)


def reusable(limit: int | None = None) -> LocalSpec:
    return LocalSpec(
        factory=Tool,
        reuse=Reuse.AFTER_RESET,
        reset=Tool.reset,
        health=lambda t: t.healthy,
        close=Tool.close,
        limit=limit,
    )


async def test_the_pool_is_the_port() -> None:
    async with Resources() as pool:
        port: ResourcePool = pool
        async with port.lease(fresh(), name="calc", owner="ep-1") as lease:
            held: ResourceLease = lease
            assert (held.name, type(held.value)) == ("calc", Tool)


async def test_reuse_never_makes_a_new_object_each_time() -> None:
    async with Resources() as pool:
        for _ in range(3):
            async with pool.lease(fresh()):
                assert pool.num_leases == 1
        assert pool.num_leases == 0
    assert [tool.num_closes for tool in Tool.made] == [1, 1, 1]


async def test_reuse_after_reset_hands_out_the_same_object() -> None:
    async with Resources() as pool:
        for _ in range(3):
            async with pool.lease(REUSABLE):
                pass
        assert pool.num_idle == 1
    (tool,) = Tool.made
    assert (tool.num_resets, tool.num_closes) == (3, 1)


REUSABLE = reusable()


@pytest.mark.parametrize("fault", ["unhealthy", "reset raises"])
async def test_what_cannot_be_made_good_is_replaced(fault: str) -> None:
    def reset(tool: Tool) -> None:
        if fault == "reset raises":
            raise OSError("stuck")

    spec = LocalSpec(factory=Tool, reuse=Reuse.AFTER_RESET, reset=reset, health=lambda t: t.healthy, close=Tool.close)
    async with Resources() as pool:
        async with pool.lease(spec) as lease:
            lease.value.healthy = False
        assert pool.num_idle == 0
        async with pool.lease(spec) as lease:
            assert lease.value is Tool.made[1]
    assert [tool.num_closes for tool in Tool.made] == [1, 1]


async def test_release_owner_ends_its_leases_only() -> None:
    async with Resources() as pool:
        async with (
            pool.lease(fresh(), owner="a") as first,
            pool.lease(fresh(), owner="a"),
            pool.lease(fresh(), owner="b") as other,
        ):
            assert await pool.release_owner("a") == 2
            assert await pool.release_owner("a") == 0
            assert other.value is Tool.made[2]
            with pytest.raises(ResourceFailed, match="ended"):
                _ = first.value
        assert [tool.num_closes for tool in Tool.made] == [1, 1, 1]
        with pytest.raises(ValueError, match="owner"):
            await pool.release_owner("")


async def test_limit_is_kept_and_turns_are_fair() -> None:
    spec, order, held = reusable(limit=2), [], 0

    async def use(pool: Resources, number: int) -> None:
        nonlocal held
        async with pool.lease(spec):
            held += 1
            assert held <= 2
            order.append(number)
            await asyncio.sleep(0)
            held -= 1

    async with Resources() as pool, asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(use(pool, number))
    assert order == list(range(10))
    assert len(Tool.made) == 2


async def test_factory_failure_is_infrastructure_and_frees_the_slot() -> None:
    broken = [True]

    async def factory() -> Tool:
        if broken.pop() if broken else False:
            raise KeyError("no such device")
        return Tool()

    spec = LocalSpec(factory=factory, limit=1)
    async with Resources() as pool:
        with pytest.raises(ResourceFailed, match="no such device"):
            async with pool.lease(spec):
                pass
        async with pool.lease(spec) as lease:
            assert isinstance(lease.value, Tool)


@pytest.mark.parametrize("where", ["factory", "body", "waiting", "close"])
async def test_cancellation_leaks_nothing(where: str) -> None:
    reached, blocked = asyncio.Event(), asyncio.Event()

    async def point(name: str) -> None:
        if name == where:
            reached.set()
            await blocked.wait()

    async def factory() -> Tool:
        await point("factory")
        return Tool()

    async def close(tool: Tool) -> None:
        await point("close")
        tool.num_closes += 1

    spec = LocalSpec(factory=factory, close=close, limit=1)

    async def use(pool: Resources) -> None:
        async with pool.lease(spec):
            await point("body")

    async with Resources() as pool:
        if where == "waiting":
            async with pool.lease(spec):
                task = asyncio.create_task(use(pool))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
        else:
            task = asyncio.create_task(use(pool))
            await reached.wait()
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled()
        blocked.set()
        where = "nowhere"
        async with asyncio.timeout(5), pool.lease(spec):  # the slot is free again
            assert pool.num_leases == 1
    assert all(tool.num_closes == 1 for tool in Tool.made)


async def test_close_ends_leases_wakes_waiters_and_twice_is_harmless() -> None:
    spec = fresh(limit=1)

    async def wait_for_one(pool: Resources) -> None:
        async with pool.lease(spec):
            raise AssertionError("nothing may be leased from a closed pool")

    pool = Resources()
    async with pool.lease(spec):
        waiters = [asyncio.create_task(wait_for_one(pool)) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        results = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(result, ResourceFailed) for result in results)
    await pool.close()
    assert [tool.num_closes for tool in Tool.made] == [1]
    with pytest.raises(ResourceFailed, match="closed"):
        async with pool.lease(spec):
            pass


@pytest.mark.parametrize(
    "given",
    [{"reuse": Reuse.AFTER_RESET}, {"reset": Tool.reset}, {"limit": 0}],
)
def test_specs_that_cannot_be_honoured_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|greater than or equal"):
        LocalSpec(factory=Tool, **given)


@given(st.lists(st.sampled_from(list(ResourceState)), max_size=12))
def test_states_move_by_the_table_only(path: list[ResourceState]) -> None:
    state = ResourceState.STARTING
    for to in path:
        if to in TRANSITIONS[state]:
            state = advance(state, to)
        else:
            with pytest.raises(AssertionError, match="cannot become"):
                advance(state, to)
    assert TRANSITIONS[ResourceState.CLOSED] == frozenset()
