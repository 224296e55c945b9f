"""The official ``anthropic`` SDK, unmodified, against an episode: whole histories, threads, streams, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from harness import Api, Begun
from tool_episodes import CALL, FIRST, LAST, THOUGHT, begin, check_one_timeline, graph_of

from bench.scripted_server import ScriptedServer, scripted_server
from bench.scripts import Reply, in_order
from wingbeat.client import AsyncSwarm
from wingbeat.core.types import FinishReason, Task

QUESTION: Any = [{"role": "user", "content": "what is 2 plus 3 ?"}]
TOOL: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a", "b", "note"],
    },
}


@beta_async_tool
async def add(a: int, b: int, note: str) -> str:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
        note: Why.
    """
    return f"{a + b} {note}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("scripted"), ["unset"]) as running:
        yield running


@pytest.fixture
async def api(server: ScriptedServer) -> AsyncIterator[Api]:
    async with Api(server) as client:  # pyright: ignore[reportArgumentType]
        yield client


@pytest.fixture
async def sdk(server: ScriptedServer) -> AsyncIterator[AsyncAnthropic]:
    """A client without a key; tests add their episode's."""
    async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def of(client: AsyncAnthropic, episode: Begun) -> AsyncAnthropic:
    return client.with_options(api_key=episode.key)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("first", [FIRST, THOUGHT, CALL], ids=["text", "thinking", "call"])
async def test_a_whole_history_is_one_timeline(
    server: ScriptedServer, api: Api, sdk: AsyncAnthropic, stream: bool, first: str
) -> None:
    episode = await begin(server, api, [first, LAST])
    client = of(sdk, episode)

    async def ask(messages: list[Any]) -> Any:
        wanted: dict[str, Any] = {"model": "solver", "max_tokens": 4096, "system": "Be brief.", "tools": [TOOL]}
        if not stream:
            return await client.messages.create(**wanted, messages=messages)
        async with client.messages.stream(**wanted, messages=messages) as events:
            return await events.get_final_message()

    message = await ask(QUESTION)
    *said, use = message.content
    assert message.stop_reason == "tool_use"
    assert (use.type, use.name, use.input) == ("tool_use", "add", {"b": 3, "a": 2, "note": "é"})
    assert [block.type for block in said] == (["thinking"] if first is THOUGHT else []) + (
        ["text"] if first is not CALL else []
    )
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "5"}]}
    history = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = await ask(history)
    assert (answer.stop_reason, [block.text for block in answer.content]) == ("end_turn", [LAST])

    graph = await graph_of(server, api, episode)
    check_one_timeline(graph)
    assert [turn.turn_id for turn in graph.turns] == [message.id, answer.id]
    assert [turn.messages[0].content for turn in graph.turns] == ["Be brief."] * 2
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        graph.turns[1].prompt_length,
        graph.turns[1].num_sampled,
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("thread", [None, False], ids=["thread", "full"])
async def test_the_tool_runner_is_one_timeline(
    server: ScriptedServer, api: Api, sdk: AsyncAnthropic, stream: bool, thread: bool | None
) -> None:
    episode = await begin(server, api, [THOUGHT, f"Again. {CALL}", LAST])
    mode: Any = {} if thread is None else {"thread": thread}
    runner: Any = of(sdk, episode).beta.messages.tool_runner(
        model="solver", max_tokens=4096, messages=QUESTION, tools=[add], system="Be brief.", stream=stream, **mode
    )
    seen: list[Any] = []
    async for item in runner:
        seen.append(await item.get_final_message() if stream else item)
    assert [message.stop_reason for message in seen] == ["tool_use", "tool_use", "end_turn"]
    assert seen[-1].content[-1].text == LAST

    graph = await graph_of(server, api, episode)
    check_one_timeline(graph, num_turns=3)
    assert [turn.turn_id for turn in graph.turns] == [message.id for message in seen]
    assert [message.role for message in graph.turns[-1].messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert len({turn.tools_digest for turn in graph.turns}) == 1
    assert "5 é" in server.engine.calls[-1].prompt


async def test_a_thread_may_be_continued_twice(server: ScriptedServer, api: Api, sdk: AsyncAnthropic) -> None:
    """Two continuations of one reply are two branches behind it."""
    episode = await begin(server, api, ["one", "two", "three"])
    client = of(sdk, episode)
    wanted: dict[str, Any] = {"model": "solver", "max_tokens": 64, "betas": ["message-threads-2026-08-12"]}
    first = await client.beta.messages.create(
        **wanted, messages=QUESTION, thread={"type": "create"}, system="Be brief."
    )
    for question in ("and now ?", "and then ?"):
        await client.beta.messages.create(
            **wanted,
            messages=[{"role": "user", "content": question}],
            thread={"type": "continue", "previous_message_id": first.id},
        )
    graph = await graph_of(server, api, episode)
    assert [turn.parent_id for turn in graph.turns] == [None, first.id, first.id]


async def test_a_lost_thread_is_replayed_by_the_sdk_itself(
    server: ScriptedServer, api: Api, sdk: AsyncAnthropic
) -> None:
    """As after an episode that was issued again: the whole conversation comes, under a new thread."""
    lost = await begin(server, api, ["one"])
    thread = of(sdk, lost).beta.messages.thread(model="solver", max_tokens=64, messages=QUESTION, system="Be brief.")
    await thread.send()
    await api.abort(lost)
    episode = await begin(server, api, ["two", "three"])
    thread._client = of(sdk, episode)
    for question in ("and now ?", "and then ?"):
        await thread.send({"role": "user", "content": question})
    graph = await graph_of(server, api, episode)
    check_one_timeline(graph)
    assert [message.content for message in graph.turns[0].messages] == [
        *("Be brief.", "what is 2 plus 3 ?", "one", "and now ?", "two")
    ]


async def test_an_unknown_thread_names_the_remedy(server: ScriptedServer, api: Api, sdk: AsyncAnthropic) -> None:
    episode = await begin(server, api, ["one"])
    with pytest.raises(anthropic.NotFoundError, match="send the whole conversation") as caught:
        await of(sdk, episode).beta.messages.create(
            model="solver",
            max_tokens=64,
            messages=QUESTION,
            thread={"type": "continue", "previous_message_id": "msg_of_nobody"},
        )
    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_not_found"}
    await api.abort(episode)


async def test_parallel_calls_and_a_failed_tool(server: ScriptedServer, api: Api, sdk: AsyncAnthropic) -> None:
    episode = await begin(server, api, [f"{CALL}\n{CALL}", LAST])
    client = of(sdk, episode)
    wanted: dict[str, Any] = {"model": "solver", "max_tokens": 4096, "tools": [TOOL]}
    message = await client.messages.create(**wanted, messages=QUESTION)
    assert [block.type for block in message.content] == ["tool_use", "tool_use"]
    one, two = (block.id for block in message.content if block.type == "tool_use")
    results = [
        {"type": "tool_result", "tool_use_id": one, "content": "5"},
        {"type": "tool_result", "tool_use_id": two, "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    history: list[Any] = [*QUESTION, {"role": "assistant", "content": message.content}]
    await client.messages.create(**wanted, messages=[*history, {"role": "user", "content": results}])
    graph = await graph_of(server, api, episode)
    check_one_timeline(graph)
    roles = [(message.role, message.content) for message in graph.turns[1].messages[2:-1]]
    assert roles == [("tool", "5"), ("tool", "error"), ("user", "Go on.")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_why_a_turn_ended(server: ScriptedServer, api: Api, sdk: AsyncAnthropic, stream: bool) -> None:
    episode = await begin(server, api, ["one two three", "four five", "six"])
    client = of(sdk, episode)

    async def ask(**more: Any) -> Any:
        wanted: dict[str, Any] = {"model": "solver", "messages": QUESTION, **more}
        if not stream:
            return await client.messages.create(**wanted)
        async with client.messages.stream(**wanted) as events:
            return await events.get_final_message()

    stopped = await ask(max_tokens=64, stop_sequences=["two"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")
    cut = await ask(max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    ended = await ask(max_tokens=64)
    assert (ended.stop_reason, ended.stop_sequence, ended.content[0].text) == ("end_turn", None, "six")
    await api.abort(episode)


async def test_text_and_thinking_stream_as_they_come(server: ScriptedServer, api: Api, sdk: AsyncAnthropic) -> None:
    episode = await begin(server, api, ["<think>\nHm.\n</think>\n\nWell, yes."])
    seen: list[tuple[str, str]] = []
    async with of(sdk, episode).messages.stream(model="solver", max_tokens=64, messages=QUESTION) as events:
        async for event in events:
            if event.type in ("thinking", "text"):
                seen.append((event.type, getattr(event, event.type)))
    assert "".join(piece for kind, piece in seen if kind == "thinking") == "Hm."
    assert "".join(piece for kind, piece in seen if kind == "text") == "Well, yes."
    assert len(seen) > 4
    await api.abort(episode)


async def test_an_error_before_the_first_event_is_a_status(
    server: ScriptedServer, api: Api, sdk: AsyncAnthropic
) -> None:
    episode = await begin(server, api, [Reply("broken", FinishReason.ERROR)])
    with pytest.raises(anthropic.APIStatusError, match="broken") as caught:
        async with of(sdk, episode).messages.stream(model="solver", max_tokens=64, messages=QUESTION) as events:
            await events.get_final_message()
    assert caught.value.status_code == 503
    await api.abort(episode)


async def test_an_error_in_the_stream_is_the_sdks_own(server: ScriptedServer, api: Api, sdk: AsyncAnthropic) -> None:
    episode = await begin(server, api, [Reply("abcdef", hold_after=3)])
    text = ""
    async with of(sdk, episode).messages.stream(model="solver", max_tokens=64, messages=QUESTION) as events:
        with pytest.raises(anthropic.APIStatusError, match="ended while this call ran") as caught:
            async for piece in events.text_stream:
                text += piece
                if text == "abc":
                    await api.abort(episode)
    assert text == "abc"
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "conflict_error")


async def test_our_client_tells_the_address_for_this_sdk(server: ScriptedServer, api: Api) -> None:
    server.engine.script = in_order([LAST])
    async with AsyncSwarm(server.url) as swarm, swarm.episode(task=Task("calculator", "plus-1-2")) as episode:
        assert (episode.anthropic_base_url, f"{episode.anthropic_base_url}/v1") == (server.url, episode.base_url)
        async with AsyncAnthropic(base_url=episode.anthropic_base_url, api_key=episode.api_key) as client:
            message = await client.messages.create(model=episode.model, max_tokens=64, messages=QUESTION)
        assert message.stop_reason == "end_turn"
        await episode.finish(1.0)


async def test_refusals_are_the_sdks_own(server: ScriptedServer, api: Api, sdk: AsyncAnthropic) -> None:
    episode = await begin(server, api, [LAST])
    client = of(sdk, episode)
    with pytest.raises(anthropic.AuthenticationError):
        await sdk.messages.create(model="solver", max_tokens=64, messages=QUESTION)
    with pytest.raises(anthropic.NotFoundError, match="no policy 'claude'"):
        await client.messages.create(model="claude", max_tokens=64, messages=QUESTION)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="'image'") as caught:
        await client.messages.create(model="solver", max_tokens=64, messages=[{"role": "user", "content": [image]}])
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["param"] == "messages[0].content[0]"
    assert (await api.finish(episode)).status == 200
    with pytest.raises(anthropic.ConflictError):
        await client.messages.create(model="solver", max_tokens=64, messages=QUESTION)


@pytest.mark.parametrize("way", ["x-api-key", "bearer", "path"])
async def test_the_key_travels_in_either_header_or_in_the_path(server: ScriptedServer, api: Api, way: str) -> None:
    episode = await begin(server, api, [LAST])
    ways: dict[str, Any] = {
        "x-api-key": {
            "base_url": server.url,
            "api_key": None,
            "default_headers": {"x-api-key": episode.key, "anthropic-version": "2023-06-01"},
        },
        "bearer": {"base_url": server.url, "auth_token": episode.key},
        "path": {"base_url": f"{server.url}/s/{episode.key}", "api_key": "anything"},
    }
    async with AsyncAnthropic(**ways[way], max_retries=0) as client:
        message = await client.messages.create(model="solver", max_tokens=128_000, messages=QUESTION, timeout=60)
    assert message.content[0].type == "text"
    await api.abort(episode)


async def test_tokens_are_counted_without_a_turn(server: ScriptedServer, api: Api, sdk: AsyncAnthropic) -> None:
    episode = await begin(server, api, [LAST])
    client = of(sdk, episode)
    wanted: dict[str, Any] = {"model": "solver", "messages": QUESTION, "tools": [TOOL], "system": "Be brief."}
    count = await client.messages.count_tokens(**wanted)
    message = await client.messages.create(**wanted, max_tokens=64)
    assert count.input_tokens == message.usage.input_tokens
    assert (await graph_of(server, api, episode)).num_turns == 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}, {"type": "none"}])
async def test_tool_choices_keep_the_timeline(
    server: ScriptedServer, api: Api, sdk: AsyncAnthropic, choice: Any
) -> None:
    """A choice is about one reply: the tools stay in the prompt, so nothing forks."""
    episode = await begin(server, api, [FIRST, CALL])
    client = of(sdk, episode)
    wanted: dict[str, Any] = {"model": "solver", "max_tokens": 4096, "tools": [TOOL]}
    message = await client.messages.create(**wanted, messages=QUESTION)
    use = message.content[-1]
    assert use.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "5"}
    history: list[Any] = [*QUESTION, {"role": "assistant", "content": message.content}]
    answer = await client.messages.create(
        **wanted, messages=[*history, {"role": "user", "content": [result]}], tool_choice=choice
    )
    assert answer.stop_reason == ("end_turn" if choice["type"] == "none" else "tool_use")
    check_one_timeline(await graph_of(server, api, episode))


async def test_unknown_paths_are_told_in_the_sdks_own_shape_and_without_the_key(
    server: ScriptedServer, api: Api, sdk: AsyncAnthropic
) -> None:
    episode = await begin(server, api, [])
    client = sdk.with_options(base_url=f"{server.url}/s/{episode.key}", api_key="none")
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.batches.list()
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert episode.key not in str(body) and "/s/.../v1/messages/batches" in body["error"]["message"]
    await api.abort(episode)
