"""Agents that take too long, in every way in which Python lets them, and processes that hold too much."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from wingbeat.client import deadlines
from wingbeat.client.agents import Agent
from wingbeat.client.deadlines import Deadline, EpisodeOverdue, memory_mb


class Watch:
    """A deadline, and what it did."""

    def __init__(self, limit_s: float) -> None:
        self.given_up: list[str] = []
        self.checked = asyncio.Event()
        self.deadline = Deadline(limit_s, on_check=self.checked.set)

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def give_up(message: str) -> None:
            self.given_up.append(message)

        return await self.deadline.run(work, give_up=give_up)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LEAVING_S", 0.02)


async def test_who_is_in_time_notices_nothing() -> None:
    async def agent() -> int:
        return 7

    async def broken() -> None:
        raise ValueError("a bug")

    watch = Watch(10)
    assert await watch.run(agent()) == 7
    with pytest.raises(ValueError, match="a bug"):
        await watch.run(broken())
    assert not watch.given_up


async def test_an_overdue_agent_is_cancelled_and_its_episode_ended_first() -> None:
    ended: list[str] = []

    async def agent() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("tidied up")

    watch = Watch(0.01)
    with pytest.raises(EpisodeOverdue, match=r"longer than 0\.01 s"):
        await watch.run(agent())
    assert watch.given_up == ["the agent ran longer than 0.01 s (episode_timeout_s)"]
    await watch.checked.wait()
    assert ended == ["tidied up"] and watch.deadline.num_stuck == 0


async def test_an_agent_that_swallows_its_cancellation_counts_as_stuck() -> None:
    release = asyncio.Event()

    async def agent() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    watch = Watch(0.01)
    with pytest.raises(EpisodeOverdue):
        await watch.run(agent())
    await watch.checked.wait()
    assert watch.deadline.num_stuck == 1
    release.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert watch.deadline.num_stuck == 0


async def test_a_thread_that_runs_on_is_counted_until_it_ends() -> None:
    release = threading.Event()
    agent = Agent(lambda episode: release.wait(10) and 1.0)
    watch = Watch(0.01)
    episode: Any = None
    with pytest.raises(EpisodeOverdue):
        await watch.run(agent.run(episode))
    await watch.checked.wait()
    assert agent.num_stuck == 1
    release.set()
    await until(lambda: agent.num_stuck == 0)


async def test_a_runner_that_stops_takes_the_agent_along() -> None:
    cancelled = asyncio.Event()

    async def agent() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    watch = Watch(60)
    running = asyncio.create_task(watch.run(agent()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cancelled.is_set() and not watch.given_up


def test_memory_is_that_of_this_process() -> None:
    before = memory_mb()
    held = b"x" * (64 * 2**20)
    assert 5 < before < 100_000 and memory_mb() >= before + 32
    del held


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (a thread's end has no event)
            await asyncio.sleep(0.001)
