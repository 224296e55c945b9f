"""Budgets of rates and money, drawn by leases and by what uses them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from fake_backend import FakeBackend, fake

from wingbeat.core.errors import ConfigError
from wingbeat.resources import Budgets, Draw, Meters, RateLimiter, ResourceFailed, Resources, ResourceWait, of_process
from wingbeat.resources import budgets as budgets_module
from wingbeat.resources.budgets import memory_mb, num_cpus
from wingbeat.resources.stats import Area


class Metered(FakeBackend):
    """One whose instances draw while they are in use."""

    meters: Meters | None = None


def pool_of(folder: Path, budgets: Budgets, backend: FakeBackend | None = None) -> Resources:
    return Resources(budgets, backends={"fake": backend or FakeBackend()}, ledger=folder)


def test_of_this_machine() -> None:
    whole, part = Budgets.of_machine(), Budgets.of_machine(processes=4)
    assert whole.cpus == num_cpus()
    assert part.cpus == max(1.0, num_cpus() / 4)
    assert whole.memory_mb == memory_mb()
    assert 100 < memory_mb() < 1 << 30
    assert part.memory_mb == memory_mb() // 4


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 64.0),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64.0),
        ({}, 64.0),
    ],
    ids=["v2", "v2-unlimited", "v1", "v1-unlimited", "none"],
)
def test_a_container_has_its_share_of_the_processors(
    files: dict[str, str], cpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(budgets_module, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert num_cpus() == cpus


def test_times_of_nothing_are_never_negative() -> None:
    area = Area()
    for _ in range(6):
        area.begin(0.7)
    added = 0.0
    for _ in range(6):
        added += 0.7
    assert added > 6 * 0.7, "the rounding that this is about"
    assert area.seconds(0.7) == 0.0


def test_processes_that_share_a_machine_have_its_parts() -> None:
    parts = {budget.name: budget.capacity for budget in of_process(4).budgets()}
    assert parts["cpus"] == max(1.0, num_cpus() / 4)
    assert parts["memory_mb"] == memory_mb() // 4


async def test_leases_draw_from_a_rate_in_turn(tmp_path: Path) -> None:
    now = [0.0]
    spec = fake(draw=Draw(budget="judge", requests=1, tokens=400))
    budgets = Budgets(requests_per_minute={"judge": 2}, tokens_per_minute={"judge": 1000})
    async with Resources(
        budgets, backends={"fake": FakeBackend()}, ledger=tmp_path, clock=lambda: now[0], wait_s=1000
    ) as pool:
        for _ in range(2):
            async with pool.lease(spec):
                pass
        assert [(stats.name, stats.used) for stats in pool.budgets()] == [
            ("requests_per_minute.judge", 2),
            ("tokens_per_minute.judge", 800),
        ]
        third = asyncio.create_task(_use(pool, spec))
        await asyncio.sleep(0.01)
        assert not third.done()
        now[0] = 30.0  # one of two requests has come back, and half a thousand tokens
        await asyncio.wait_for(_again_and_again(pool, third), 5)


async def _again_and_again(pool: Resources, task: asyncio.Task[None]) -> None:
    """The pool's timer is of the loop, its clock is the test's: have it look."""
    while not task.done():
        pool._turns._rates_came_back()  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)
    await task


async def _use(pool: Resources, spec: object) -> None:
    async with pool.lease(spec):  # pyright: ignore[reportArgumentType]
        pass


async def test_rates_let_the_next_one_in_by_themselves() -> None:
    limiter = RateLimiter(requests_per_minute=60 * 50)  # one in 20 ms, after the first minute's worth
    await limiter.take(requests=60 * 50)
    began = time.monotonic()
    await asyncio.gather(limiter.take(), limiter.take())
    assert time.monotonic() - began > 0.035


async def test_money_that_is_spent_is_no_reason_to_wait(tmp_path: Path) -> None:
    spec = fake(draw=Draw(budget="judge", cost=0.4))
    async with pool_of(tmp_path, Budgets(cost={"judge": 1.0})) as pool:
        await _use(pool, spec)
        await _use(pool, spec)
        with pytest.raises(ResourceFailed, match=r"cost\.judge: 0\.8 of 1 are spent"):
            await _use(pool, spec)
        with pytest.raises(ConfigError, match="at most 1"):
            await _use(pool, fake(draw=Draw(budget="judge", cost=2)))
        with pytest.raises(ConfigError, match=r"expected one of the pool's \(judge\), got 'jugde'"):
            await _use(pool, fake(draw=Draw(budget="jugde")))


async def test_a_back_end_draws_from_the_pools_budgets(tmp_path: Path) -> None:
    backend = Metered()
    budgets = Budgets(tokens_per_minute={"judge": 1000}, cost={"judge": 1.0})
    async with pool_of(tmp_path, budgets, backend) as pool, pool.lease(fake()):
        meters = backend.meters
        assert meters is not None
        assert await meters.take("judge", tokens=10_000) == 1000, "an estimate beyond a minute's worth is cut"
        meters.settle("judge", tokens=-600)
        assert await meters.take("judge", tokens=600, cost=0.5) == 600
        with pytest.raises(ResourceWait, match=r"tokens_per_minute\.judge did not come back far enough"):
            await meters.take("judge", tokens=900, wait_s=0.01)
        meters.settle("judge", cost=0.6)
        with pytest.raises(ResourceFailed, match="spent"):
            await meters.take("judge", tokens=1)
        assert await meters.take("", tokens=5) == 0
        with pytest.raises(ConfigError, match="budget"):
            await meters.take("other")


async def test_debt_is_waited_for_and_who_is_cancelled_has_drawn_nothing() -> None:
    now = [0.0]
    limiter = RateLimiter(tokens_per_minute=600, clock=lambda: now[0])
    assert await limiter.take(tokens=600) == 600
    limiter.settle(tokens=300)  # it used more than it had said
    waiting = asyncio.create_task(limiter.take(tokens=100))
    await asyncio.sleep(0)
    now[0] = 39.0
    limiter.settle(tokens=0.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    now[0] = 60.0
    assert await limiter.take(tokens=300) == 300
    limiter.close()
