"""What cannot be started is not started again and again: pauses that grow, one try at a time, clear words."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend, Thing, fake

from wingbeat.resources import (
    Budgets,
    DockerSpec,
    RaySpec,
    ResourceFailed,
    ResourceLost,
    Resources,
    ResourceWait,
    SandboxSpec,
    Spec,
    pool_breakers,
)


class Breaking(FakeBackend):
    """Starts nothing while it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = True
        self.tried_at: list[float] = []

    @property
    def num_tries(self) -> int:
        return len(self.tried_at)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> Thing:
        self.tried_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        if self.is_broken:
            raise RuntimeError("there is no such image")
        return await super().start(spec, started=started)


@pytest.fixture
def backend() -> Breaking:
    return Breaking()


@pytest.fixture
async def pool(backend: Breaking, tmp_path: Path) -> AsyncIterator[Resources]:
    async with asyncio.timeout(20), Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as resources:
        yield resources


async def number_of(pool: Resources, spec: Spec, **more: Any) -> int:
    async with pool.lease(spec, **more) as lease:
        return lease.value.number


async def break_it(pool: Resources, spec: Spec) -> None:
    for _ in range(pool_breakers.MAX_FAILURES):
        with pytest.raises(ResourceFailed, match="start of a fake resource failed: RuntimeError: there is no such im"):
            await number_of(pool, spec)


async def test_one_tries_for_all_and_all_are_told(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 0.02)
    await break_it(pool, fake())
    for num_failures in (6, 7):
        results = await asyncio.gather(*(number_of(pool, fake()) for _ in range(20)), return_exceptions=True)
        told = [str(result) for result in results if str(result).startswith("the last")]
        assert len(told) == 19
        assert len({id(result) for result in results}) == 20, "each has an error of its own"
        words = (
            rf"the last {num_failures} starts of a fake failed, the next try is in 0.0\d* s: .*there is no such image"
        )
        for text in told:
            assert re.match(words, text), text
        assert backend.num_tries == num_failures
    (stats,) = pool.snapshot()
    assert (stats.starts, stats.start_failures) == (7, 7)
    backend.is_broken = False
    assert len({await number_of(pool, fake()) for _ in range(3)}) == 1
    assert not pool._breakers.is_any_broken


async def test_pauses_grow_and_end_with_a_success(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 0.01)
    monkeypatch.setattr(pool_breakers, "MAX_COOL_S", 0.05)
    await break_it(pool, fake())
    for _ in range(4):
        with pytest.raises(ResourceFailed):
            await number_of(pool, fake())
    waits = [after - before for before, after in itertools.pairwise(backend.tried_at[-5:])]
    assert all(wait >= least for wait, least in zip(waits, (0.01, 0.02, 0.04, 0.05), strict=True)), waits
    backend.is_broken = False
    assert await asyncio.gather(*(number_of(pool, fake(limit=1)) for _ in range(5))) == [0, 0, 0, 0, 0]


async def test_those_in_line_are_told_and_others_go_on(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 100.0)
    spec = fake(word="broken", limit=1)
    results = await asyncio.gather(*(number_of(pool, spec) for _ in range(9)), return_exceptions=True)
    assert backend.num_tries == 5
    assert [str(result)[:8] for result in results] == ["the star"] * 5 + ["the last"] * 4
    backend.is_broken = False
    assert await number_of(pool, fake(word="fine")) == 0


async def test_one_that_is_given_back_is_lent_though_starts_fail(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 100.0)
    backend.is_broken = False
    async with pool.lease(fake(limit=2), name="mine", owner="me"):
        backend.is_broken = True
        await break_it(pool, fake(limit=2))
        assert await number_of(pool, fake(limit=2), name="mine", owner="me") == 0
        waiting = asyncio.create_task(number_of(pool, fake(limit=2)))
        await asyncio.sleep(0)
    assert await waiting == 0
    assert await number_of(pool, fake(limit=2)) == 0


async def test_the_wait_for_a_try_ends_with_its_time_its_owner_and_the_pool(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 100.0)
    await break_it(pool, fake())
    with pytest.raises(
        ResourceWait, match=r"waited for 0.01 s; the last 5 starts of a fake failed, the next try is in"
    ):
        await number_of(pool, fake(), wait_s=0.01)
    owned = asyncio.create_task(number_of(pool, fake(), owner="me"))
    several = asyncio.create_task(_several(pool))
    cancelled = asyncio.create_task(number_of(pool, fake()))
    await asyncio.sleep(0)
    assert [stats.waiting for stats in pool.snapshot()] == [3]
    await pool.release_owner("me")
    with pytest.raises(ResourceLost, match="its episode is over"):
        await owned
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await pool.close()
    with pytest.raises(ResourceFailed, match="the resource pool is closed"):
        await several
    assert backend.num_tries == 5


async def test_the_wait_for_a_try_is_part_of_the_wait(
    backend: Breaking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 0.02)
    now, waits = [0.0], list[float | None]()

    async with (
        asyncio.timeout(20),
        Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path, clock=lambda: now[0]) as pool,
    ):
        await break_it(pool, fake())
        change_of = pool._turns.change_of

        def noted(request: Any, wait_s: float | None) -> Any:
            waits.append(wait_s)
            return change_of(request, wait_s)

        monkeypatch.setattr(pool._turns, "change_of", noted)
        backend.is_broken = False
        waiting = asyncio.create_task(number_of(pool, fake(), wait_s=60.0))
        await asyncio.sleep(0)
        now[0] = 45.5
        assert await waiting == 0
    assert waits == [15.0]


async def _several(pool: Resources) -> None:
    async with pool.lease_all({"a": fake(word="a"), "b": fake()}, owner="other"):
        raise AssertionError("b cannot be started")


async def test_who_gives_up_its_try_leaves_it_to_the_next(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 0.01)
    await break_it(pool, fake())
    backend.is_broken = False
    hanging = asyncio.Event()

    async def hang() -> None:
        hanging.set()
        await asyncio.Event().wait()

    backend.at("start", hang)
    first = asyncio.create_task(number_of(pool, fake()))
    await hanging.wait()
    second = asyncio.create_task(number_of(pool, fake()))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1


async def test_what_was_fetched_ahead_in_vain_waits_when_it_is_leased(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "COOL_S", 0.01)
    await break_it(pool, fake())
    pool.prefetch(fake(), owner="me")
    await asyncio.sleep(0)
    backend.is_broken = False
    assert await number_of(pool, fake(), owner="me") == 0
    await pool.release_owner("me")


def test_what_comes_from_tasks_makes_no_other_start() -> None:
    """Else a missing image would not be noticed where each task has files of its own."""
    one, other = {"a.txt": "1"}, {"b.txt": "2"}
    image = "python:3.12-slim"
    assert DockerSpec(image=image, files=one, label="x").start_key == DockerSpec(image=image, files=other).start_key
    assert DockerSpec(image=image).start_key != DockerSpec(image="other").start_key
    assert SandboxSpec().start_key != SandboxSpec(memory_mb=100).start_key
    boxes = [RaySpec(box=SandboxSpec(files=files, env={"A": str(len(files))})) for files in (one, other, {})]
    assert len({box.start_key for box in boxes}) == 1


async def test_no_more_is_remembered_than_needed(
    pool: Resources, backend: Breaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_breakers, "MAX_KEPT", 3)
    for number in range(10):
        with pytest.raises(ResourceFailed):
            await number_of(pool, fake(word=str(number)))
    assert len(pool._breakers._broken) == 3
