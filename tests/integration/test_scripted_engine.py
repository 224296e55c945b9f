"""The scripted engine against the real control: what clients' tests and the gateway benchmark stand on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from harness import QUESTION, Api, Begun, eventually, read_graph

from bench.scripted_server import ScriptedServer, scripted_server
from bench.scripted_tokens import logprob_of
from bench.scripts import Reply
from wingbeat.core.types import FinishReason

TOOL_CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "1+2"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("scripted"), ["unset"]) as running:
        yield running


@pytest.fixture
async def api(server: ScriptedServer) -> AsyncIterator[Api]:
    async with Api(server) as client:
        yield client


def say(server: ScriptedServer, *replies: Reply | str) -> None:
    """Each episode that is begun from now on hears these."""
    said: dict[str, int] = {}

    def script(call):
        said[call.cache_key] = said.get(call.cache_key, -1) + 1
        return replies[said[call.cache_key]]

    server.engine.script = script


async def test_tool_episode_trains_what_was_scripted(server: ScriptedServer, api: Api):
    say(server, TOOL_CALL, "The answer is 3")
    episode = await api.begin()
    first = (await api.chat(episode, tools=TOOLS)).body["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    (called,) = first["message"]["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"expression": "1+2"}
    result = {"role": "tool", "tool_call_id": called["id"], "content": "3"}
    messages = [*QUESTION, first["message"], result]
    second = await api.chat(episode, messages=messages, tools=TOOLS, max_tokens=64)
    assert second.body["choices"][0]["message"]["content"] == "The answer is 3"
    assert (await api.finish(episode)).status == 200
    one, two = read_graph(server, episode.id, episode.attempt).turns
    assert two.parent_id == one.turn_id and two.fork_reason == ""
    assert one.logprobs.tolist() == [logprob_of(token) for token in one.sampled.tolist()]
    assert server.engine.calls[-1].prompt.endswith("assistant\n") and TOOL_CALL in server.engine.calls[-1].prompt


async def test_length_and_errors_reach_the_caller(server: ScriptedServer, api: Api):
    say(server, Reply("unfinished", FinishReason.LENGTH), "too long for its limit", Reply("broken", FinishReason.ERROR))
    episode = await api.begin()
    reasons = [(await api.chat(episode, max_tokens=n)).body["choices"][0]["finish_reason"] for n in (64, 3)]
    assert reasons == ["length", "length"]
    answer = await api.chat(episode)
    assert answer.status == 503 and "broken" in answer.error["message"]


async def test_streams_token_by_token_and_can_be_held(server: ScriptedServer, api: Api):
    say(server, Reply("abcdefgh", hold_after=3))
    episode = await api.begin()
    text = ""
    async for line in stream(api, episode):
        text += content(line)
        if text == "abc":
            server.engine.release()
    assert text == "abcdefgh"


async def test_hanging_up_aborts_a_held_reply(server: ScriptedServer, api: Api):
    say(server, Reply("abcdefgh", hold_after=3))
    episode = await api.begin()
    lines = stream(api, episode)
    async for line in lines:
        if content(line):
            break
    await lines.aclose()
    await api.until_metric("wingbeat_requests_in_flight", 0.0)
    assert (await api.finish(episode)).status == 200


async def test_control_may_be_killed_and_started_again(tmp_path):
    with scripted_server(tmp_path, ["one", "two"]) as own:
        async with Api(own) as client:
            await client.begin()
            before = own.url
            own.kill()
            await asyncio.to_thread(own.start)
            await asyncio.to_thread(own.until_served)
            assert own.url == before
            episode = await eventually(lambda: begin(client), what="an episode after the restart")
            assert (await client.chat(episode)).body["choices"][0]["message"]["content"] == "one"


async def begin(client: Api) -> Begun | None:
    answer = await client.call("POST", "/api/episodes", client.begin_body())
    return client.begun(answer) if answer.status == 200 else None


async def stream(api: Api, episode: Begun) -> AsyncIterator[str]:
    body = {"model": "solver", "messages": QUESTION, "stream": True}
    headers = {"Authorization": f"Bearer {episode.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(api.url + "/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        async for line in response.content:
            yield line.decode().strip()


def content(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return choices[0]["delta"].get("content") or "" if choices else ""
