"""What is fetched ahead is nobody's hindrance: neither to its owner nor to others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_backend import FakeBackend, FakeSpec, fake

from wingbeat.resources import Budgets, Resources

A, B = fake(word="a", limit=1), fake(word="b", limit=1)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Resources]:
    async with (
        asyncio.timeout(10),
        Resources(Budgets(), backends={"fake": FakeBackend()}, ledger=tmp_path, wait_s=None) as resources,
    ):
        yield resources


async def soon() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def use(pool: Resources, spec: FakeSpec, owner: str) -> None:
    async with pool.lease(spec, owner=owner):
        pass


async def use_both(pool: Resources, owner: str) -> None:
    async with pool.lease_all({"a": A, "b": B}, owner=owner):
        await asyncio.sleep(0)


async def test_what_was_left_in_line_is_given_back_once_it_is_let_in(pool: Resources) -> None:
    async with pool.lease(A):
        pool.prefetch({"a": A, "b": B}, owner="f")
        lease = asyncio.create_task(use(pool, A, "f"))
        await soon()
        lease.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await lease
    await soon()
    await use(pool, A, "other")


async def test_two_who_fetched_one_each_and_want_both_have_their_turns(pool: Resources) -> None:
    pool.prefetch(A, owner="f")
    pool.prefetch(B, owner="g")
    await soon()
    await asyncio.gather(use_both(pool, "f"), use_both(pool, "g"))


async def test_what_comes_while_its_owner_waits_for_something_else_is_given_up(pool: Resources) -> None:
    async with pool.lease(B):
        async with pool.lease(A):
            pool.prefetch(A, owner="f")
            waiting = asyncio.create_task(use(pool, B, "f"))
            await soon()
        await use(pool, A, "other")
    await waiting


async def test_what_is_there_while_its_owner_waits_for_something_else_is_given_up(pool: Resources) -> None:
    async with pool.lease(B):
        pool.prefetch(A, owner="f")
        await soon()
        alone = asyncio.create_task(use(pool, B, "f"))
        await soon()
        await use(pool, A, "other")
        pool.prefetch(A, owner="g")
        await soon()
        together = asyncio.create_task(use_both(pool, "g"))
        await soon()
        pool.prefetch(A, owner="f")  # while it waits for another
        await soon()
    await asyncio.gather(alone, together)


async def test_what_is_fetched_while_its_owner_waits_is_not_kept(pool: Resources) -> None:
    async with pool.lease(B):
        waiting = asyncio.create_task(use(pool, B, "f"))
        await soon()
        pool.prefetch(A, owner="f")
        await soon()
        await use(pool, A, "other")
    await waiting


async def test_who_waits_for_several_keeps_nothing_else(pool: Resources) -> None:
    async def use_others() -> None:
        async with pool.lease_all({"b": B, "c": fake(word="c")}, owner="f"):
            pass

    async with pool.lease(B):
        pool.prefetch(A, owner="f")
        waiting = asyncio.create_task(use_others())
        await soon()
        await use(pool, A, "other")
    await waiting
