"""A pool is a pool: what agents may count on holds for one of their process and for one of a resources server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cutting import Cut
from fake_backend import failing, held
from fake_boxes import FakeBox, FakeBoxes, box_spec
from lending import lender

from wingbeat.core.errors import ConfigError
from wingbeat.resources import (
    Budgets,
    ResourceFailed,
    ResourceLost,
    Resources,
    ResourceWait,
    UnsupportedField,
    remote_pool,
)
from wingbeat.resources.remote import RemoteResources
from wingbeat.server.resources import grants

pytestmark = pytest.mark.parametrize("kind", ["local", "remote"])
ONE = box_spec(limit=1)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@dataclass
class Place:
    """A pool, and what is behind it."""

    pool: Any
    inner: Resources
    """Where the instances are: of this process, or of the server."""
    boxes: FakeBoxes

    async def is_idle(self) -> None:
        """Until nothing is held or waited for."""
        async with asyncio.timeout(10):
            while self.inner.num_leases or any(  # noqa: ASYNC110
                c.leased or c.waiting or c.live > c.idle for c in self.inner.snapshot()
            ):
                await asyncio.sleep(0.002)

    async def has_waiting(self, count: int) -> None:
        async with asyncio.timeout(10):
            while sum(c.waiting for c in self.inner.snapshot()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def place(kind: str) -> AsyncIterator[Place]:
    boxes = FakeBoxes()
    if kind == "local":
        async with Resources(Budgets(cpus=4), backends={"subprocess": boxes}) as pool:
            yield Place(pool, pool, boxes)
        return
    # what is given back must be said to be: silence would take too long
    async with lender({"subprocess": boxes}, cpus=4, heartbeat_s=30) as server, RemoteResources(server.url) as pool:
        yield Place(pool, server.pool, boxes)


async def test_a_turn_that_does_not_come_is_a_failure_and_leaves_the_line(kind: str) -> None:
    async with place(kind) as here:
        async with here.pool.lease(ONE):
            for wait_s in (0.0, 0.02):
                with pytest.raises(ResourceWait, match=r"was not first in line|too much of it stayed"):
                    async with here.pool.lease(ONE, wait_s=wait_s):
                        pass
        await here.is_idle()


async def test_the_wait_is_for_the_turn_and_not_for_the_start(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants, "POLL_S", 0.01)
    monkeypatch.setattr(remote_pool, "LATE_S", 0.0)
    async with place(kind) as here:
        began, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            began.set()
            await go_on.wait()

        here.boxes.at("start", slow)
        lease = here.pool.lease(ONE, wait_s=0.01)
        entering = asyncio.create_task(lease.__aenter__())
        await began.wait()
        await asyncio.sleep(0.03)  # longer than the wait
        go_on.set()
        await entering
        await lease.__aexit__(None, None, None)


async def test_all_or_none(kind: str) -> None:
    async with place(kind) as here:
        here.boxes.at("start", lambda: None, failing(RuntimeError("it is broken")))
        with pytest.raises(ResourceFailed, match="it is broken"):
            async with here.pool.lease_all({"a": box_spec(label="a"), "b": box_spec(label="b")}, owner="e"):
                pass
        await here.is_idle()
        async with here.pool.lease_all({"a": box_spec(label="a"), "b": box_spec(label="b")}, owner="e") as both:
            assert list(both) == ["a", "b"]
            assert [(await lease.value.run("hello")).stdout for lease in both.values()] == [b"hello"] * 2
        async with here.pool.lease_all({}) as none:
            assert none == {}
        await here.is_idle()


async def test_names_are_of_their_owner(kind: str) -> None:
    async with place(kind) as here:
        async with (
            here.pool.lease(box_spec(), name="it", owner="e") as one,
            here.pool.lease(box_spec(), name="it", owner="e") as same,
            here.pool.lease(box_spec(), name="it", owner="f") as other,
            here.pool.lease(box_spec(), owner="e") as nameless,
        ):
            await one.value.run("mine")
            assert await same.value.list() == ["mine"]
            assert await other.value.list() == await nameless.value.list() == []
            assert (one.name, one.owner, one.spec, one.ended) == ("it", "e", box_spec(), False)
            with pytest.raises(ConfigError, match=r"^'e' holds 'it' with another spec"):
                async with here.pool.lease(box_spec(label="x"), name="it", owner="e"):
                    pass
            assert await one.value.list() == ["mine"]
        assert one.ended
        with pytest.raises(ResourceLost, match="has ended; take a new one"):
            _ = one.value
        await here.is_idle()


async def test_what_is_fetched_ahead_is_taken_over_or_given_back(kind: str) -> None:
    async with place(kind) as here:
        here.pool.prefetch({"a": box_spec(label="a"), "b": box_spec(label="b")}, owner="e")
        here.pool.prefetch(box_spec(label="c"), owner="e")
        async with here.pool.lease(box_spec(label="a"), name="a", owner="e") as lease:
            assert await lease.value.list() == []
        assert [stats.starts for stats in here.inner.snapshot()] == [1, 1, 1]
        assert await here.pool.release_owner("e") == 0
        await here.is_idle()
        with pytest.raises(ValueError, match="owner: expected a name"):
            here.pool.prefetch(box_spec(), owner="")


async def test_an_owner_that_is_released_loses_all_that_it_has_and_waits_for(kind: str) -> None:
    async with place(kind) as here:
        async with here.pool.lease(ONE, owner="e") as lease, here.pool.lease(box_spec(), owner="f") as other:
            waiting = asyncio.create_task(here.pool.lease(ONE, owner="e").__aenter__())
            await here.has_waiting(1)
            box = lease.value
            assert await here.pool.release_owner("e") == 1
            with pytest.raises(ResourceLost, match="the resources of 'e' were released, its episode is over"):
                _ = lease.value
            with pytest.raises(ResourceLost, match="the resources of 'e' were released"):
                await waiting
            if kind != "local":  # whose boxes are the caller's to leave alone
                with pytest.raises(ResourceLost, match="were released"):
                    await box.run("again")
            assert (await other.value.run("mine")).ok
        assert await here.pool.release_owner("e") == 0
        with pytest.raises(ValueError, match="owner: expected a name"):
            await here.pool.release_owner("")
        await here.is_idle()


async def test_a_release_that_is_cancelled_goes_on_and_what_the_owner_leases_then_stays(kind: str) -> None:
    async with place(kind) as here:
        cleaning, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            cleaning.set()
            await go_on.wait()

        here.boxes.at("reset", slow)
        async with here.pool.lease(box_spec(), owner="e"):
            release = asyncio.create_task(here.pool.release_owner("e"))
            await cleaning.wait()
            release.cancel()
            with pytest.raises(asyncio.CancelledError):
                await release
            lease = here.pool.lease(box_spec(label="then"), owner="e")
            entering = asyncio.create_task(lease.__aenter__())
            await asyncio.sleep(0.05)
            go_on.set()
            again = await entering
            async with asyncio.timeout(5):
                while not here.inner.num_idle:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)  # after the release, too
            assert (await again.value.run("true")).ok
            await lease.__aexit__(None, None, None)
        await here.is_idle()


async def test_a_lost_resource_is_replaced(kind: str) -> None:
    async with place(kind) as here:
        with pytest.raises(ResourceLost, match="for the test"):
            async with here.pool.lease(box_spec()):
                raise ResourceLost("for the test")
        await here.is_idle()
        async with here.pool.lease(box_spec()):
            (stats,) = here.inner.snapshot()
            assert (stats.quarantined, stats.starts) == (1, 2)


async def test_what_cannot_be_leased_is_refused_at_once_and_by_name(kind: str) -> None:
    async with place(kind) as here:
        for spec, error, words in (
            (box_spec(cpus=8), ConfigError, "cpus"),
            (box_spec(disk_mb=5), UnsupportedField, "'disk_mb' is not supported; for the test"),
            ({"kind": "subprocess"}, ConfigError, "expected a spec, got dict"),
        ):
            with pytest.raises(error, match=words):
                async with here.pool.lease(spec):
                    pass
        assert here.boxes.made == []
        here.boxes.at("before start", failing(RuntimeError("no room")))
        with pytest.raises(ResourceFailed, match="no room"):
            async with here.pool.lease(box_spec()):
                pass
        await here.is_idle()


async def test_a_pool_that_closes_ends_everything(kind: str) -> None:
    async with place(kind) as here:
        block = here.pool.lease(ONE, owner="e")
        lease = await block.__aenter__()
        waiting = asyncio.create_task(here.pool.lease(ONE).__aenter__())
        await here.has_waiting(1)
        here.pool.prefetch(box_spec(label="ahead"), owner="e")
        await asyncio.gather(here.pool.close(), here.pool.close())
        with pytest.raises(ResourceFailed, match="closed"):
            _ = lease.value
        with pytest.raises(ResourceFailed, match="closed"):
            await waiting
        with pytest.raises(ResourceFailed, match="closed"):
            async with here.pool.lease(box_spec()):
                pass
        assert await here.pool.release_owner("e") == 0
        await here.is_idle()


async def one(pool: Any) -> None:
    async with pool.lease(ONE, name="it", owner="e") as lease:
        await lease.value.run("dirt")


async def several(pool: Any) -> None:
    async with pool.lease_all({"a": ONE, "b": box_spec(label="b", cpus=2)}, owner="e"):
        await asyncio.sleep(0)


async def fetched(pool: Any) -> None:
    try:
        pool.prefetch({"a": box_spec(label="a"), "b": ONE}, owner="f")
        async with pool.lease(ONE, name="b", owner="f"):
            await asyncio.sleep(0)
    finally:
        await pool.release_owner("f")


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("scene", [one, several, fetched], ids=lambda scene: scene.__name__)
async def test_cancelled_at_every_await_nothing_is_left(
    kind: str, scene: Callable[[Any], Awaitable[None]], late: bool
) -> None:
    async with place(kind) as here:
        for at in range(100):
            cut = Cut(scene(here.pool), at, late=late)  # pyright: ignore[reportArgumentType]
            (result,) = await asyncio.gather(asyncio.create_task(cut.run()), return_exceptions=True)
            assert result is None or isinstance(result, asyncio.CancelledError), result
            if scene is fetched:
                await here.pool.release_owner("f")  # as whoever ends the attempt does
            await here.is_idle()
            async with asyncio.timeout(5):
                await one(here.pool)
            if cut.num_awaits <= at:
                return
    raise AssertionError("more awaits than expected")


async def test_a_box_that_is_held_up_is_of_its_holder_alone(kind: str) -> None:
    """What was asked of a box before its lease ended must not come to the one who has it next."""
    if kind == "local":
        pytest.skip("the caller has the box itself")
    async with place(kind) as here:
        go_on = asyncio.Event()
        here.boxes.at("read", held(go_on))
        here.boxes.at("run", held(go_on))
        async with here.pool.lease(ONE, owner="first") as lease:
            asked = [asyncio.create_task(lease.value.read("secret")), asyncio.create_task(lease.value.run("stolen"))]
            async with asyncio.timeout(5):
                while not here.boxes.num_running:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await here.pool.release_owner("first")
            for task in asked:
                with pytest.raises(ResourceLost, match="released"):
                    await task
        async with here.pool.lease(ONE, owner="second") as lease:
            go_on.set()
            await asyncio.sleep(0.02)
            assert await lease.value.list() == []
            assert isinstance(here.boxes.made[0], FakeBox) and here.boxes.num_running == 0
