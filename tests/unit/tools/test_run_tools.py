"""The usual loop, with OpenAI's own client against a scripted endpoint, and an episode's leases."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from wingbeat.client.blame import explain_failure
from wingbeat.client.episode import Episode
from wingbeat.client.retry import RetryPolicy
from wingbeat.core.errors import RequestError
from wingbeat.core.protocol import BeginReply, FinishReply, GroupModel, TaskModel
from wingbeat.core.types import Cause, Split
from wingbeat.resources import LocalSpec, ResourceLost, Resources
from wingbeat.tools import Stopped, Toolbox, run_tools, tool

SHELF = LocalSpec(factory=list)


@tool(resources={"shelf": SHELF})
def put(item: str, shelf: list[str]) -> str:
    "Put something on the shelf."
    if item == "bomb":
        raise ResourceLost("the shelf is gone")
    shelf.append(item)
    return f"{len(shelf)} on the shelf"


@tool
async def whose(episode: Episode) -> str:
    "Tell whose shelf it is."
    return episode.id


def calls(*wanted: tuple[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call-{name}-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(wanted)
        ],
    }


@asynccontextmanager
async def endpoint(*script: dict[str, Any]) -> AsyncIterator[tuple[str, list[Any]]]:
    """(base URL, bodies of requests) of a model that says one thing after another."""
    bodies: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        message = script[len(bodies) - 1]
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "solver", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", bodies
    finally:
        await runner.cleanup()


class Answers:
    """A transport whose server says yes."""

    async def send(self, call: Any, reply: type[Any]) -> Any:
        return FinishReply(episode_id="e1", attempt=1, state="finished", num_turns=0, num_sampled_tokens=0)

    async def send_unread(self, call: Any) -> bytes:
        return b""


def make_episode(base_url: str, pool: Resources) -> Episode:
    reply = BeginReply(
        episode_id="e1",
        attempt=1,
        base_url=base_url,
        api_key="key",
        policies=["solver"],
        heartbeat_s=10,
        task=TaskModel(id="t"),
        group=GroupModel(id="g", size=1),
        split=Split.TRAIN,
    )
    beats: Any = SimpleNamespace(add=lambda beat: None, remove=lambda key: None)
    transport: Any = Answers()
    return Episode(reply, transport=transport, heartbeats=beats, finish_retry=RetryPolicy(budget_s=1), resources=pool)


ANSWER = {"role": "assistant", "content": "done"}
ASK = [{"role": "user", "content": "tidy up"}]


@pytest.mark.slow  # loads the SDK
async def test_the_loop_runs_tools_until_the_model_answers(tmp_path: Path) -> None:
    two = calls(("put", '{"item": "milk"}'), ("put", '{"item": 3}'))
    async with endpoint(two, calls(("whose", "")), ANSWER) as (url, bodies), Resources(ledger=tmp_path) as pool:
        episode = make_episode(url, pool)
        async with episode.openai() as client, Toolbox([put, whose]).for_episode(episode) as tools:
            run = await run_tools(client, episode, ASK, tools, max_turns=5, temperature=0.5)
            assert tools.lease("shelf").value == ["milk"], "the reward sees what the tools did"
            async with episode.lease(SHELF, name="shelf") as lease:
                assert lease.value == ["milk"]
        await episode.finish(1.0)
    assert (run.answer, run.num_turns, run.stopped, run.finish_reason) == ("done", 3, Stopped.ANSWERED, "stop")
    assert [(result.content, result.is_error) for result in run.results] == [
        ("1 on the shelf", False),
        ("error: wrong arguments for put\nitem: expected a valid string, got 3", True),
        ("e1", False),
    ]
    assert run.num_errors == 1
    assert [message["role"] for message in run.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert bodies[0]["model"] == "solver" and bodies[0]["temperature"] == 0.5
    assert [entry["function"]["name"] for entry in bodies[0]["tools"]] == ["put", "whose"]
    assert bodies[2]["messages"] == json.loads(json.dumps(run.messages[:-1]))
    assert ASK == [{"role": "user", "content": "tidy up"}], "the caller's list is the caller's"


@pytest.mark.slow
async def test_the_loop_ends_after_its_turns_and_opens_a_toolbox_by_itself(tmp_path: Path) -> None:
    again = calls(("put", '{"item": "milk"}'))
    async with endpoint(again, again) as (url, _), Resources(ledger=tmp_path) as pool:
        episode = make_episode(url, pool)
        async with episode.openai() as client:
            run = await run_tools(client, episode, ASK, Toolbox([put]), max_turns=2)
            with pytest.raises(RequestError, match="max_turns"):
                await run_tools(client, episode, ASK, Toolbox([put]), max_turns=0)
        assert (run.stopped, run.num_turns, run.answer) == (Stopped.MAX_TURNS, 2, "")
        assert run.messages[-1]["content"] == "2 on the shelf"
        assert pool.num_leases == 0


async def test_what_a_toolbox_needs_can_be_fetched_ahead(tmp_path: Path) -> None:
    made: list[str] = []

    def make() -> list[str]:
        made.append("one")
        return []

    @tool(resources={"shelf": LocalSpec(factory=make), "other": LocalSpec(factory=dict)})
    def look(shelf: list[str], other: dict[str, str]) -> int:
        "Look."
        return len(made)

    toolbox = Toolbox([look])
    async with Resources(ledger=tmp_path) as pool:
        episode = make_episode("http://127.0.0.1/v1", pool)
        episode.prefetch(toolbox.resources)
        async with toolbox.for_episode(episode) as tools:
            assert (await tools.call("look")).content == "1"
        await episode.finish(1.0)
        assert pool.num_leases == 0


@pytest.mark.slow
async def test_infrastructure_that_fails_in_a_tool_is_no_reward(tmp_path: Path) -> None:
    async with endpoint(calls(("put", '{"item": "bomb"}'))) as (url, _), Resources(ledger=tmp_path) as pool:
        episode = make_episode(url, pool)
        async with episode.openai() as client:
            with pytest.raises(ResourceLost, match="the shelf is gone") as caught:
                await run_tools(client, episode, ASK, Toolbox([put]), max_turns=2)
    assert explain_failure(caught.value, server=url)[0] is Cause.INFRASTRUCTURE_ERROR
