"""Resources that an episode holds end with it, however it ends."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from wingbeat.client.agents import agent
from wingbeat.client.episode import Episode, EpisodeState
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.sync import LoopPort, Swarm, SyncEpisode
from wingbeat.core.errors import ConfigError, EpisodeClosed, RequestError, UnavailableError
from wingbeat.core.protocol import BeginReply, FinishReply, GroupModel, TaskModel
from wingbeat.core.types import Split
from wingbeat.resources import Budgets, LocalSpec, Needs, Resources, Reuse


class Answers:
    """A transport whose server says yes."""

    async def send(self, call: Any, reply: type[Any]) -> Any:
        return FinishReply(episode_id="e1", attempt=1, state="finished", num_turns=0, num_sampled_tokens=0)

    async def send_unread(self, call: Any) -> bytes:
        return b""


def make_episode(pool: Resources | None, *, attempt: int = 1) -> Episode:
    reply = BeginReply(
        episode_id="e1",
        attempt=attempt,
        base_url="http://127.0.0.1/v1",
        api_key="key",
        policies=["solver"],
        heartbeat_s=10,
        task=TaskModel(id="t"),
        group=GroupModel(id="g", size=1),
        split=Split.TRAIN,
    )
    heartbeats: Any = SimpleNamespace(add=lambda beat: None, remove=lambda episode_id: None)
    answers: Any = Answers()
    return Episode(
        reply, transport=answers, heartbeats=heartbeats, finish_retry=RetryPolicy(budget_s=1.0), resources=pool
    )


@pytest.mark.parametrize("end", ["finish", "abort", "lost"])
async def test_a_lease_ends_with_its_episode(end: str) -> None:
    closed: list[str] = []
    spec = LocalSpec(factory=lambda: "sandbox", close=closed.append)
    async with Resources() as pool:
        episode = make_episode(pool)
        lease = episode.lease(spec, name="repo")
        held = await lease.__aenter__()
        assert held.value == "sandbox"
        if end == "finish":
            await episode.finish(1.0)
        elif end == "abort":
            await episode.abort("enough")
        else:
            episode._lose("no sign of life")
            await episode._released()
        assert closed == ["sandbox"], "the object is freed although its block still runs"
        assert pool.num_leases == 0
        await lease.__aexit__(None, None, None)
        with pytest.raises(EpisodeClosed):
            episode.lease(spec)


async def test_the_end_of_a_lost_attempt_leaves_the_next_one_its_resources() -> None:
    """A client that was slow may hold two attempts of one episode."""
    closed: list[str] = []
    async with Resources() as pool:
        first, second = make_episode(pool), make_episode(pool, attempt=2)
        async with second.lease(LocalSpec(factory=lambda: "sandbox", close=closed.append)):
            await first.abort("superseded")
            assert closed == []
        assert closed == ["sandbox"]


async def test_a_block_that_ends_first_gives_back_first() -> None:
    closed: list[str] = []
    async with Resources() as pool:
        episode = make_episode(pool)
        async with episode.lease(LocalSpec(factory=lambda: "tool", close=closed.append)) as tool:
            assert tool.value == "tool"
        assert closed == ["tool"]
        assert episode.state is EpisodeState.OPEN
        await episode.finish(0.0)


async def test_without_a_pool_the_fix_is_named() -> None:
    with pytest.raises(RequestError, match="resources=Resources"):
        make_episode(None).lease(LocalSpec(factory=object))


def test_synchronous_agents_lease_too() -> None:
    async def scene() -> list[str]:
        closed: list[str] = []
        async with Resources() as pool:
            episode = make_episode(pool)

            def agent() -> str:
                with SyncEpisode(episode, port).lease(LocalSpec(factory=lambda: "tool", close=closed.append)) as tool:
                    return tool.value

            port = LoopPort(asyncio.get_running_loop())
            closed.insert(0, await asyncio.to_thread(agent))
        return closed

    assert asyncio.run(scene()) == ["tool", "tool"]


class Sandbox:
    """Counts those that are open; its methods are coroutine functions, as a box's are."""

    alive: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name
        Sandbox.alive.append(name)

    def close(self) -> None:
        Sandbox.alive.remove(self.name)


@pytest.fixture(autouse=True)
def no_sandboxes() -> None:
    Sandbox.alive = []


@functools.cache
def sandbox(name: str) -> LocalSpec:
    return LocalSpec(factory=lambda: Sandbox(name), close=Sandbox.close, limit=1)


async def test_what_an_agent_declares_starts_as_its_episode_begins() -> None:
    seen: list[list[str]] = []

    @agent(resources={"repo": lambda task: sandbox(f"repo of {task.id}"), "db": sandbox("db")})
    async def solve(episode: Episode) -> float:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen.append(sorted(Sandbox.alive))
        async with episode.lease(sandbox("repo of t"), name="repo") as repo:
            assert repo.value.name == "repo of t"
        return 1.0

    async with Resources() as pool:
        episode = make_episode(pool)
        assert await solve.run(episode) == 1.0
        assert seen == [["db", "repo of t"]]
        await episode.finish(1.0)
        assert pool.num_leases == 0
        async with pool.lease(sandbox("db"), wait_s=5):
            assert Sandbox.alive == ["db"], "what was fetched and never leased serves the next one"
    assert Sandbox.alive == []


async def test_what_can_never_be_had_fails_the_agent_at_once() -> None:
    big = LocalSpec(factory=list, needs=Needs(cpus=10_000))

    @agent(resources={"big": big})
    async def solve(episode: Episode) -> float:
        raise AssertionError("it should not begin")

    async with Resources() as pool:
        with pytest.raises(ConfigError, match="cpus"):
            await solve.run(make_episode(pool))
    with pytest.raises(RequestError, match="resources=Resources"):
        await solve.run(make_episode(None))


async def test_several_at_once_and_one_name_is_one_thing() -> None:
    async with Resources() as pool:
        episode = make_episode(pool)
        async with episode.lease_all({"a": sandbox("a"), "b": sandbox("b")}) as held:
            assert {name: lease.value.name for name, lease in held.items()} == {"a": "a", "b": "b"}
            async with episode.lease(sandbox("a"), name="a", wait_s=0.01) as again:
                assert again.value is held["a"].value
        assert Sandbox.alive == []


async def test_the_server_giving_an_attempt_up_ends_its_wait_for_a_turn() -> None:
    async def wait_for_one(episode: Episode) -> None:
        async with episode.lease(sandbox("a")):
            raise AssertionError("it is over")

    async with Resources() as pool, pool.lease(sandbox("a")):
        episode = make_episode(pool)
        waiting = asyncio.create_task(wait_for_one(episode))
        await asyncio.sleep(0)
        episode._lose("no sign of life")
        with pytest.raises(UnavailableError, match="its episode is over"):
            await waiting


async def test_synchronous_agents_fetch_ahead_and_lease_several() -> None:
    @agent(resources={"a": sandbox("a"), "b": sandbox("b")})
    def solve(episode: SyncEpisode) -> float:
        with episode.lease_all({"a": sandbox("a"), "b": sandbox("b")}) as held:
            assert held["b"].value.name == "b"
            assert sorted(Sandbox.alive) == ["a", "b"]
        episode.prefetch(sandbox("a"))
        return 1.0

    async with Resources() as pool:
        episode = make_episode(pool)
        assert await solve.run(episode) == 1.0
        await episode.abort("done")
        assert pool.num_leases == 0


def test_the_pool_of_a_synchronous_swarm_ends_with_it() -> None:
    """It lives on the swarm's background loop, so that nobody else could close it."""
    closed: list[str] = []
    pool = Resources(Budgets())
    spec = LocalSpec(factory=object, reset=id, close=lambda _: closed.append("idle"), reuse=Reuse.AFTER_RESET)
    swarm = Swarm("http://127.0.0.1:9", resources=pool)
    with swarm._port.entered(pool.lease(spec)):  # pyright: ignore[reportPrivateUsage]
        pass
    assert pool.num_idle == 1
    swarm.close()
    swarm.close()
    assert closed == ["idle"]
