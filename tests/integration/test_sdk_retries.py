"""The official SDK's own retries: an answer that came late is fetched, sampled once and counted once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest
from harness import QUESTION, Api, eventually, read_graph
from openai import AsyncOpenAI

from bench.scripted_server import scripted_server
from bench.scripts import Reply, ScriptedCall
from wingbeat.core.types import FinishReason

MESSAGES: Any = QUESTION
TURNS = 'wingbeat_turns_total{policy="solver"}'
UNDELIVERED = 'wingbeat_untrainable_tokens_total{policy="solver",reason="superseded: undelivered"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = {"server.retry_grace_s": 30.0}
    with scripted_server(tmp_path_factory.mktemp("retries"), ["unset"], settings=settings) as running:
        yield running


@pytest.fixture
async def api(server: Any) -> AsyncIterator[Api]:
    async with Api(server) as client:
        yield client


def sdk(api: Api, key: str, **options: float) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{api.url}/v1", api_key=key, **options)  # type: ignore[arg-type]


async def test_a_timeout_of_the_sdk_costs_no_second_sample(api: Api, server: Any) -> None:
    """Three requests go out; the third finds the answer of the first."""
    server.engine.script = lambda call: Reply("late", delay_s=1.5)
    before = len(server.engine.calls)
    episode = await api.begin()
    async with sdk(api, episode.key, timeout=0.4, max_retries=5) as client:
        answer = await client.chat.completions.create(model="solver", messages=MESSAGES)
    assert answer.choices[0].message.content == "late"
    assert len(server.engine.calls) - before == 1
    assert (await api.finish(episode)).body["num_turns"] == 1
    graph = read_graph(server, episode.id, episode.attempt)
    assert graph.turns[0].turn_id == answer.id and graph.superseded() == {}


async def test_an_agent_that_gives_up_leaves_a_reply_that_does_not_train(api: Api, server: Any) -> None:
    server.engine.script = lambda call: Reply("late", delay_s=0.6)
    replies = await api.metric(TURNS)
    episode = await api.begin()
    async with sdk(api, episode.key, timeout=0.2, max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="solver", messages=MESSAGES)
    await api.until_metric(TURNS, replies + 1)
    assert (await api.finish(episode)).status == 200
    graph = read_graph(server, episode.id, episode.attempt)
    assert list(graph.superseded().values()) == ["undelivered"]
    assert (await api.metrics())[
        'wingbeat_untrainable_tokens_total{policy="solver",reason="superseded: undelivered"}'
    ] > 0


async def test_an_engine_error_is_retried_and_sampled_anew(api: Api, server: Any) -> None:
    said: list[str] = []

    def script(call: ScriptedCall) -> Reply:
        said.append(call.cache_key)
        return Reply("broken", FinishReason.ERROR) if len(said) == 1 else Reply("fine")

    server.engine.script = script
    episode = await api.begin()
    async with sdk(api, episode.key, max_retries=2) as client:
        answer = await client.chat.completions.create(model="solver", messages=MESSAGES)
    assert (answer.choices[0].message.content, len(said)) == ("fine", 2)
    await api.abort(episode)


async def test_a_finished_episode_is_told_once(api: Api, server: Any) -> None:
    """The SDK would repeat a 409; `x-should-retry` spares that."""
    episode = await api.begin()
    await api.abort(episode)
    requests = 0

    async def count(*_: object) -> None:
        nonlocal requests
        requests += 1

    async with sdk(api, episode.key, max_retries=5) as client:
        client._client.event_hooks["request"].append(count)
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="solver", messages=MESSAGES)
    assert requests == 1


async def test_leaving_a_stream_aborts_it_and_what_was_seen_can_be_continued(api: Api, server: Any) -> None:
    server.engine.script = lambda call: Reply("one two three", hold_after=4) if call.turn == 0 else Reply("four")
    episode = await api.begin()
    async with sdk(api, episode.key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="solver", messages=MESSAGES, stream=True)
        seen: list[str] = []
        async for part in stream:
            if part.choices[0].delta.content:
                seen.append(part.choices[0].delta.content)
            if len(seen) == 4:
                break
        await stream.close()

        async def idle() -> bool:
            return (await api.metrics())["wingbeat_requests_in_flight"] == 0

        await eventually(idle, what="the generation to be aborted")
        messages = [*MESSAGES, {"role": "assistant", "content": "".join(seen)}, {"role": "user", "content": "on"}]
        await client.chat.completions.create(model="solver", messages=messages)
    assert (await api.finish(episode)).status == 200
    graph = read_graph(server, episode.id, episode.attempt)
    one, two = graph.turns
    assert (one.finish_reason, two.parent_id) == ("abort", one.turn_id)
    assert one.num_sampled == 4 and graph.superseded() == {}


async def test_a_raw_connection_that_never_reads_is_no_delivery(api: Api, server: Any) -> None:
    server.engine.script = lambda call: Reply("late", delay_s=0.5)
    episode = await api.begin()
    before = await api.metric(TURNS)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(TimeoutError):
            await session.post(
                f"{api.url}/v1/chat/completions",
                json={"model": "solver", "messages": MESSAGES},
                headers={"x-api-key": episode.key},
                timeout=aiohttp.ClientTimeout(total=0.2),
            )
    await api.until_metric(TURNS, before + 1)
    assert (await api.finish(episode)).status == 200
    assert len(read_graph(server, episode.id, episode.attempt).superseded()) == 1
