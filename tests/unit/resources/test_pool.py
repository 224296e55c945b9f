"""The pool over a back-end whose every step can be held up or made to fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_backend import FakeBackend, failing, fake, held

from wingbeat.core.errors import ConfigError
from wingbeat.resources import (
    Budgets,
    LocalSpec,
    Needs,
    ResourceFailed,
    ResourceLost,
    Resources,
    ResourceWait,
    Reuse,
    Spec,
)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def pool(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[Resources]:
    async with Resources(Budgets(cpus=4), backends={"fake": backend}, ledger=tmp_path) as resources:
        yield resources
    assert backend.alive == {}
    assert all(thing.num_closes <= 1 for thing in backend.made)
    assert os.listdir(tmp_path) == []


async def soon() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- names


async def test_one_name_of_one_owner_is_one_instance_until_its_last_lease_ends(
    pool: Resources, backend: FakeBackend
) -> None:
    async with pool.lease(fake(), name="repo", owner="a") as tool:
        async with pool.lease(fake(), name="repo", owner="a") as reward:
            assert reward.value is tool.value
            tool.value.dirt.append("what the agent changed")
        assert reward.ended
        assert tool.value.dirt == ["what the agent changed"], "not reset while one lease of it goes on"
        async with pool.lease(fake(), name="repo", owner="b") as other:
            assert other.value is not tool.value
        async with pool.lease(fake(), name="other", owner="a") as other:
            assert other.value is not tool.value
    assert backend.made[0].dirt == []


async def test_a_name_stands_for_one_spec_only(pool: Resources) -> None:
    async with pool.lease(fake(), name="repo", owner="a"):
        with pytest.raises(ConfigError, match="another spec"):
            async with pool.lease(fake(word="other"), name="repo", owner="a"):
                raise AssertionError("two specs under one name")
    async with pool.lease(fake(word="other"), name="repo", owner="a") as lease:
        assert lease.value.spec.word == "other"


async def test_leases_of_one_name_share_the_start_and_one_may_leave(pool: Resources, backend: FakeBackend) -> None:
    go = asyncio.Event()
    backend.at("start", held(go))

    async def use() -> int:
        async with pool.lease(fake(), name="repo", owner="a") as lease:
            return lease.value.number

    first, second = asyncio.create_task(use()), asyncio.create_task(use())
    await soon()
    first.cancel()
    await soon()
    go.set()
    assert await second == 0
    assert len(backend.made) == 1


async def test_leases_without_a_name_are_each_their_own(pool: Resources) -> None:
    async with pool.lease(fake(), owner="a") as one, pool.lease(fake(), owner="a") as two:
        assert one.value is not two.value


# --- reuse


async def test_shared_ones_serve_all_and_outlive_the_first_to_leave(pool: Resources, backend: FakeBackend) -> None:
    spec = fake(reuse=Reuse.SHARED)
    async with pool.lease(spec, owner="b") as last:
        async with pool.lease(spec, owner="a") as first:
            assert first.value is last.value
        assert last.value.is_alive
        assert backend.alive
    async with pool.lease(spec) as again:
        assert again.value is backend.made[0]
        assert again.value.num_resets == 0
    assert len(backend.made) == 1


async def test_max_uses_ends_an_instance(pool: Resources, backend: FakeBackend) -> None:
    for _ in range(5):
        async with pool.lease(fake(max_uses=2)):
            pass
    assert [thing.num_resets for thing in backend.made] == [1, 1, 1]


async def test_max_uses_of_a_shared_one_counts_those_who_join(pool: Resources, backend: FakeBackend) -> None:
    spec = fake(reuse=Reuse.SHARED, max_uses=2)
    async with pool.lease(spec) as one, pool.lease(spec) as two, pool.lease(spec) as three:
        assert one.value is two.value
        assert three.value is not one.value
        assert len(backend.alive) == 2


async def test_a_reset_that_raises_has_it_replaced(pool: Resources, backend: FakeBackend) -> None:
    backend.at("reset", failing(RuntimeError("no")))
    async with pool.lease(fake(limit=1)) as lease:
        lease.value.dirt.append("dirt")
    assert backend.alive == {}
    async with pool.lease(fake(limit=1)) as lease:
        assert (lease.value.number, lease.value.dirt) == (1, [])
    assert pool.snapshot()[0].quarantined == 1


async def test_a_reset_that_hangs_has_it_replaced(pool: Resources, backend: FakeBackend) -> None:
    backend.at("reset", held(asyncio.Event()))
    spec = fake(limit=1, reset_timeout_s=0.01)
    async with pool.lease(spec):
        pass
    async with pool.lease(spec) as lease:
        assert lease.value.number == 1


async def test_one_that_died_while_idle_is_replaced_before_it_is_handed_out(
    pool: Resources, backend: FakeBackend
) -> None:
    async with pool.lease(fake(limit=1)) as lease:
        lease.value.is_alive = True
    assert pool.num_idle == 1
    backend.made[0].is_alive = False
    async with pool.lease(fake(limit=1)) as lease:
        assert (lease.value.number, lease.value.is_alive) == (1, True)
    stats = pool.snapshot()[0]
    assert (stats.quarantined, stats.starts, stats.live, stats.idle) == (1, 2, 1, 1)


async def test_a_dead_one_whose_replacement_fails_fails_the_lease(pool: Resources, backend: FakeBackend) -> None:
    async with pool.lease(fake(limit=1)):
        pass
    backend.made[0].is_alive = False
    backend.at("start", failing(OSError("no more")))
    with pytest.raises(ResourceFailed, match="no more"):
        async with pool.lease(fake(limit=1)):
            raise AssertionError("nothing could be handed out")
    async with pool.lease(fake(limit=1)) as lease:
        assert lease.value.number == 2


async def test_a_holder_that_finds_it_lost_has_it_taken_out(pool: Resources, backend: FakeBackend) -> None:
    with pytest.raises(ResourceLost):
        async with pool.lease(fake()):
            raise ResourceLost("the box is gone")
    assert (backend.made[0].num_resets, backend.made[0].num_closes) == (0, 1)
    assert pool.snapshot()[0].quarantined == 1


async def test_a_shared_one_found_lost_serves_nobody_new(pool: Resources, backend: FakeBackend) -> None:
    spec = fake(reuse=Reuse.SHARED)
    async with pool.lease(spec) as first:
        with pytest.raises(ResourceLost):
            async with pool.lease(spec):
                raise ResourceLost("gone")
        async with pool.lease(spec) as other:
            assert other.value is not first.value
    assert backend.made[0].num_closes == 1
    assert pool.num_idle == 1


# --- budgets and turns


async def test_instances_hold_their_needs_until_they_are_gone(pool: Resources, backend: FakeBackend) -> None:
    spec = fake(reuse=Reuse.NEVER, needs=Needs(cpus=2))

    async def use() -> None:
        async with pool.lease(spec):
            await soon()

    await asyncio.gather(*(use() for _ in range(8)))
    assert backend.num_alive_at_most == 2
    (cpus,) = pool.budgets()
    assert (cpus.name, cpus.capacity, cpus.used, cpus.waiting) == ("cpus", 4, 0, 0)


async def test_too_large_is_refused_at_once(pool: Resources) -> None:
    with pytest.raises(ConfigError, match=r"cpus: expected at most 4.*got 5"):
        async with pool.lease(fake(needs=Needs(cpus=5))):
            raise AssertionError("it cannot fit")
    with pytest.raises(ConfigError, match=r"cpus: expected at most 4.*got 6"):
        async with pool.lease_all({"a": fake(needs=Needs(cpus=3)), "b": fake(word="b", needs=Needs(cpus=3))}):
            raise AssertionError("they cannot fit together")
    with pytest.raises(ConfigError, match="limit"):
        async with pool.lease_all({"a": fake(limit=1), "b": fake(limit=1)}):
            raise AssertionError("two of one")
    async with pool.lease(fake()):
        assert pool.num_leases == 1


async def test_idle_ones_of_other_specs_make_room(pool: Resources, backend: FakeBackend) -> None:
    for word in "abcd":
        async with pool.lease(fake(word=word, needs=Needs(cpus=1), idle_ttl_s=None)):
            pass
    assert pool.num_idle == 4
    async with pool.lease(fake(word="big", needs=Needs(cpus=3))):
        assert [thing.spec.word for thing in backend.alive.values()] == ["d", "big"]


async def test_the_idle_are_closed_after_a_while(pool: Resources, backend: FakeBackend) -> None:
    closed = asyncio.Event()
    backend.at("close", closed.set)
    async with pool.lease(fake(idle_ttl_s=0.01)):
        pass
    assert pool.num_idle == 1
    await asyncio.wait_for(closed.wait(), 5)
    assert pool.num_idle == 0


async def test_waiting_ends_at_its_deadline_and_says_for_what(pool: Resources) -> None:
    async with pool.lease(fake(limit=1)):
        with pytest.raises(ResourceWait, match="first in line for limit of fake") as waited:
            async with pool.lease(fake(limit=1), wait_s=0.01):
                raise AssertionError("there is only one")
        assert waited.value.code == "resource_wait"
    async with pool.lease(fake(limit=1), wait_s=0.01):
        assert pool.num_leases == 1


async def test_who_waits_longer_outlasts_who_waits_less(pool: Resources) -> None:
    ended: list[float] = []

    async def wait(wait_s: float) -> None:
        with pytest.raises(ResourceWait):
            async with pool.lease(fake(limit=1), wait_s=wait_s):
                raise AssertionError("there is only one")
        ended.append(wait_s)

    async with pool.lease(fake(limit=1)):
        gone = asyncio.create_task(wait(0.02))
        waiting = [asyncio.create_task(wait(wait_s)) for wait_s in (0.05, 0.01, 60.0, 0.03)]
        await soon()
        gone.cancel()
        waiting[2].cancel()
        await asyncio.gather(*waiting, gone, return_exceptions=True)
        assert ended == [0.01, 0.03, 0.05]
        assert pool.snapshot()[0].waiting == 0


async def test_a_start_that_hangs_is_ended(pool: Resources, backend: FakeBackend) -> None:
    backend.at("start", held(asyncio.Event()))
    with pytest.raises(ResourceFailed, match=r"longer than 0\.01 s"):
        async with pool.lease(fake(limit=1, start_timeout_s=0.01)):
            raise AssertionError("it never started")
    async with pool.lease(fake(limit=1, start_timeout_s=0.01)):
        assert len(backend.alive) == 1


async def test_what_does_not_close_is_ended_by_its_name(pool: Resources, backend: FakeBackend) -> None:
    backend.at("close", failing(RuntimeError("no")))
    async with pool.lease(fake(reuse=Reuse.NEVER)):
        pass
    assert (pool.snapshot()[0].leaked, backend.alive, backend.reaped) == (0, {}, ["thing 0"])


async def test_a_close_that_hangs_is_counted_and_does_not_keep_its_place(
    pool: Resources, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot(handle: str) -> bool:
        raise ResourceFailed(f"{handle} does not answer")

    monkeypatch.setattr(backend, "reap", cannot)
    backend.at("close", held(asyncio.Event()))
    spec = fake(reuse=Reuse.NEVER, limit=1, close_timeout_s=0.01)
    async with pool.lease(spec):
        pass
    assert pool.snapshot()[0].leaked == 1
    async with pool.lease(spec) as lease:
        assert lease.value.number == 1
    backend.alive.clear()  # another reaps it; see test_reaper
    await pool.close()
    for path in pool._folder.iterdir():  # pyright: ignore[reportPrivateUsage]
        assert "thing 0" in path.read_text()
        path.unlink()


# --- several at once


async def test_opposite_orders_cannot_deadlock(pool: Resources) -> None:
    a, b = fake(word="a", limit=1), fake(word="b", limit=1)

    async def use(order: dict[str, object], owner: str) -> None:
        for _ in range(5):
            async with pool.lease_all(order, owner=owner) as leases:  # pyright: ignore[reportArgumentType]
                assert list(leases) == list(order)
                assert {name: lease.value.spec.word for name, lease in leases.items()} == {"a": "a", "b": "b"}
                await asyncio.sleep(0)

    async with asyncio.timeout(10):
        await asyncio.gather(
            *(use({"a": a, "b": b}, f"x{n}") for n in range(5)), *(use({"b": b, "a": a}, f"y{n}") for n in range(5))
        )


async def test_if_one_of_several_fails_none_is_held(pool: Resources, backend: FakeBackend) -> None:
    backend.at("start", lambda: None, failing(OSError("no")))
    with pytest.raises(ResourceFailed, match="no"):
        async with pool.lease_all({"a": fake(word="a"), "b": fake(word="b")}, owner="e"):
            raise AssertionError("one is missing")
    await soon()
    assert pool.num_leases == 0
    assert pool.num_idle == 1, "the good one was used by nobody"


# --- ahead of time


async def test_what_was_fetched_ahead_is_there(pool: Resources, backend: FakeBackend) -> None:
    pool.prefetch({"repo": fake(word="repo"), "db": fake(word="db")}, owner="e")
    await soon()
    assert len(backend.alive) == 2
    async with pool.lease(fake(word="db"), name="db", owner="e") as lease:
        assert lease.value is backend.made[1]
        async with pool.lease(fake(word="db"), name="db", owner="e") as same:
            assert same.value is lease.value
    assert await pool.release_owner("e") == 0
    assert [(thing.num_resets, thing.num_closes) for thing in backend.made] == [(0, 0), (1, 0)]
    async with pool.lease(fake(word="repo"), owner="someone else") as lease:
        assert lease.value is backend.made[0], "nobody has used it, so it needs no reset"


async def test_what_was_fetched_ahead_in_vain_is_tried_again(pool: Resources, backend: FakeBackend) -> None:
    backend.at("start", failing(OSError("not yet")))
    pool.prefetch(fake(), owner="e")
    await soon()
    async with pool.lease(fake(), owner="e") as lease:
        assert lease.value.number == 1


async def test_fetching_ahead_starts_all_at_the_same_time(pool: Resources, backend: FakeBackend) -> None:
    for number in range(10):
        pool.prefetch(fake(), owner=f"episode {number}")
    await soon()
    assert backend.num_starting_at_most == 10


async def test_an_owner_that_ends_while_it_fetches_leaves_nothing(pool: Resources, backend: FakeBackend) -> None:
    backend.at("start", held(asyncio.Event()))
    pool.prefetch(fake(limit=1), owner="e")
    await soon()
    await pool.release_owner("e")
    assert backend.alive == {}
    async with pool.lease(fake(limit=1)):
        assert pool.num_leases == 1


# --- ends


async def test_an_owner_that_ends_frees_those_of_it_that_wait(pool: Resources) -> None:
    async def wait_for_one() -> None:
        async with pool.lease(fake(limit=1), owner="e"):
            raise AssertionError("its owner has ended")

    async with pool.lease(fake(limit=1)):
        waiting = asyncio.create_task(wait_for_one())
        await soon()
        assert await pool.release_owner("e") == 0
        with pytest.raises(ResourceLost, match="its episode is over"):
            await waiting


async def test_a_start_that_fails_is_infrastructure(pool: Resources, backend: FakeBackend) -> None:
    backend.at("start", failing(KeyError("image")))
    with pytest.raises(ResourceFailed, match="image") as failure:
        async with pool.lease(fake()):
            raise AssertionError("it did not start")
    assert failure.value.status == 503
    stats = pool.snapshot()[0]
    assert (stats.starts, stats.start_failures, stats.live) == (1, 1, 0)


async def test_figures(backend: FakeBackend, tmp_path: Path) -> None:
    now = [0.0]
    async with Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path, clock=lambda: now[0]) as pool:
        backend.at("start", lambda: now.__setitem__(0, 2.0))
        backend.at("reset", lambda: now.__setitem__(0, 13.0))
        async with pool.lease(fake(label="repos", limit=1)):
            now[0] = 8.0
            waiting = asyncio.create_task(_use(pool, fake(label="repos", limit=1)))
            await soon()
            assert pool.snapshot()[0].waiting == 1
            now[0] = 12.0
        await waiting
        (stats,) = pool.snapshot()
    assert (stats.kind, stats.label, stats.waiting, stats.idle, stats.live) == ("fake", "repos", 0, 1, 1)
    assert (stats.wait.count, stats.wait.total_s, stats.wait.max_s) == (2, 5.0, 5.0)
    assert (stats.start.count, stats.start.total_s) == (1, 2.0)
    assert (stats.reset.count, stats.reset.total_s) == (2, 1.0)
    assert (stats.hold.count, stats.hold.total_s) == (2, 12.0)
    assert (stats.live_s, stats.busy_s) == (13.0, 12.0)
    assert stats.utilisation == 12 / 13


async def _use(pool: Resources, spec: object) -> None:
    async with pool.lease(spec):  # pyright: ignore[reportArgumentType]
        pass


def test_a_pool_goes_on_in_another_loop_only_when_it_holds_nothing(tmp_path: Path) -> None:
    pool = Resources(Budgets(), ledger=tmp_path)
    never, reused = LocalSpec(factory=list), LocalSpec(factory=list, reuse=Reuse.AFTER_RESET, reset=list.clear)

    async def use(spec: LocalSpec) -> None:
        async with pool.lease(spec) as lease:
            assert lease.value == []

    for _ in range(2):
        asyncio.run(use(never))
    asyncio.run(use(reused))
    with pytest.raises(ConfigError, match=r"another event loop.*SyncResources"):
        asyncio.run(use(reused))


async def test_what_is_fetched_ahead_is_given_up_while_its_owner_waits_for_something_else(
    pool: Resources, backend: FakeBackend
) -> None:
    """Two owners who each keep what the other waits for would wait for ever."""
    x, y = fake(word="x", limit=1), fake(word="y", limit=1)
    pool.prefetch(x, owner="a")
    pool.prefetch(y, owner="b")
    await soon()

    async def use(spec: Spec, owner: str) -> None:
        async with pool.lease(spec, owner=owner):
            await soon()
        await pool.release_owner(owner)

    async with asyncio.timeout(5):
        await asyncio.gather(use(y, "a"), use(x, "b"))
        pool.prefetch(x, owner="c")
        async with pool.lease_all({"x": x, "y": y}, owner="c") as leases:
            assert len(leases) == 2


async def test_giving_up_goes_on_along_a_long_line(pool: Resources) -> None:
    x, y = fake(word="x", limit=1), fake(word="y", limit=1)

    async def use(number: int) -> None:
        pool.prefetch(x, owner=f"e{number}")
        async with pool.lease(y, owner=f"e{number}"):
            pass

    async with asyncio.timeout(20):
        async with pool.lease(y):
            async with pool.lease(x):
                users = [asyncio.create_task(use(number)) for number in range(600)]
                await soon()
            await soon()  # x goes from one to the next, all of whom wait for y
        await asyncio.gather(*users)
    for number in range(600):
        await pool.release_owner(f"e{number}")
