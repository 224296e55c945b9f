"""Resources that an episode holds end with it, however it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.client.episode import Episode, EpisodeState
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.sync import LoopPort, SyncEpisode
from wingbeat.core.errors import EpisodeClosed, RequestError
from wingbeat.core.protocol import BeginReply, FinishReply, GroupModel, TaskModel
from wingbeat.core.types import Split
from wingbeat.resources import LocalPool, LocalSpec


class Answers:
    """A transport whose server says yes."""

    async def send(self, call: Any, reply: type[Any]) -> Any:
        return FinishReply(episode_id="e1", attempt=1, state="finished", num_turns=0, num_sampled_tokens=0)

    async def send_unread(self, call: Any) -> bytes:
        return b""


def make_episode(pool: LocalPool | None, *, attempt: int = 1) -> Episode:
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
    async with LocalPool() as pool:
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
    async with LocalPool() as pool:
        first, second = make_episode(pool), make_episode(pool, attempt=2)
        async with second.lease(LocalSpec(factory=lambda: "sandbox", close=closed.append)):
            await first.abort("superseded")
            assert closed == []
        assert closed == ["sandbox"]


async def test_a_block_that_ends_first_gives_back_first() -> None:
    closed: list[str] = []
    async with LocalPool() as pool:
        episode = make_episode(pool)
        async with episode.lease(LocalSpec(factory=lambda: "tool", close=closed.append)) as tool:
            assert tool.value == "tool"
        assert closed == ["tool"]
        assert episode.state is EpisodeState.OPEN
        await episode.finish(0.0)


async def test_without_a_pool_the_fix_is_named() -> None:
    with pytest.raises(RequestError, match="resources=LocalPool"):
        make_episode(None).lease(LocalSpec(factory=object))


def test_synchronous_agents_lease_too() -> None:
    async def scene() -> list[str]:
        closed: list[str] = []
        async with LocalPool() as pool:
            episode = make_episode(pool)

            def agent() -> str:
                with SyncEpisode(episode, port).lease(LocalSpec(factory=lambda: "tool", close=closed.append)) as tool:
                    return tool.value

            port = LoopPort(asyncio.get_running_loop())
            closed.insert(0, await asyncio.to_thread(agent))
        return closed

    assert asyncio.run(scene()) == ["tool", "tool"]
