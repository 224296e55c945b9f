"""The official ``openai`` SDK's responses, unmodified, against an episode: histories, previous ids, streams, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from harness import Api, Begun
from openai import AsyncOpenAI
from pydantic import BaseModel
from tool_episodes import CALL, FIRST, LAST, THOUGHT, begin, check_one_timeline, graph_of

from bench.scripted_server import ScriptedServer, scripted_server
from bench.scripts import Reply
from wingbeat.core.types import FinishReason

QUESTION = "what is 2 plus 3 ?"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a", "b", "note"],
        "additionalProperties": False,
    },
    "strict": True,
}
WANTED: dict[str, Any] = {"model": "solver", "tools": [TOOL], "instructions": "Be brief."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("scripted"), ["unset"]) as running:
        yield running


@pytest.fixture
async def api(server: ScriptedServer) -> AsyncIterator[Api]:
    async with Api(server) as client:  # pyright: ignore[reportArgumentType]
        yield client


@pytest.fixture
async def sdk(server: ScriptedServer) -> AsyncIterator[AsyncOpenAI]:
    """A client without a key; tests add their episode's."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def of(client: AsyncOpenAI, episode: Begun) -> AsyncOpenAI:
    return client.with_options(api_key=episode.key)


async def ask(client: AsyncOpenAI, *, stream: bool, **fields: Any) -> Any:
    """The response, whole or as the SDK's own helper puts it together."""
    wanted = {**WANTED, **fields}
    if not stream:
        return await client.responses.create(**wanted)
    async with client.responses.stream(**wanted) as events:
        return await events.get_final_response()


def check_first(response: Any, first: str) -> Any:
    """The call in the first response."""
    *said, call = response.output
    assert response.status == "completed"
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"b":3,"a":2,"note":"é"}')
    kinds = (["reasoning"] if first is THOUGHT else []) + (["message"] if first is not CALL else [])
    assert [item.type for item in said] == kinds
    return call


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("previous", [False, True], ids=["full", "previous"])
@pytest.mark.parametrize("first", [FIRST, THOUGHT, CALL], ids=["text", "thinking", "call"])
async def test_two_turns_with_a_tool_are_one_timeline(
    server: ScriptedServer, api: Api, sdk: AsyncOpenAI, stream: bool, previous: bool, first: str
) -> None:
    episode = await begin(server, api, [first, LAST])
    client = of(sdk, episode)
    one = await ask(client, stream=stream, input=QUESTION)
    call = check_first(one, first)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    if previous:
        two = await ask(client, stream=stream, input=[result], previous_response_id=one.id)
        assert two.previous_response_id == one.id
    else:
        two = await ask(client, stream=stream, input=[{"role": "user", "content": QUESTION}, *one.output, result])
    assert two.output_text == LAST

    graph = await graph_of(server, api, episode)
    check_one_timeline(graph)
    assert [turn.turn_id for turn in graph.turns] == [one.id, two.id]
    assert [message.role for message in graph.turns[1].messages] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    assert (two.usage.input_tokens, two.usage.output_tokens) == (
        graph.turns[1].prompt_length,
        graph.turns[1].num_sampled,
    )


async def test_instructions_hold_for_one_response_only(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    """The same ones extend the earlier turn; others, or none, are another prompt: a fork."""
    episode = await begin(server, api, ["one", "two", "three", "four"])
    client = of(sdk, episode)
    first = await client.responses.create(model="solver", input="a", instructions="Be brief.")
    same = await client.responses.create(
        model="solver", input="b", instructions="Be brief.", previous_response_id=first.id
    )
    other = await client.responses.create(
        model="solver", input="b", instructions="Be kind.", previous_response_id=first.id
    )
    none = await client.responses.create(model="solver", input="b", previous_response_id=first.id)
    graph = await graph_of(server, api, episode)
    turns = {turn.turn_id: turn for turn in graph.turns}
    assert (turns[same.id].parent_id, turns[same.id].fork_reason) == (first.id, "")
    assert (turns[other.id].parent_id, turns[none.id].parent_id) == (None, None)
    assert "message 0 differs" in turns[other.id].fork_reason
    assert turns[none.id].fork_reason
    contents = [[message.content for message in turns[response.id].messages] for response in (other, none)]
    assert contents == [["Be kind.", "a", "one", "b", "three"], ["a", "one", "b", "four"]]


async def test_a_response_that_was_not_stored_can_be_continued(
    server: ScriptedServer, api: Api, sdk: AsyncOpenAI
) -> None:
    """Every turn is kept until its episode ends, whatever ``store`` says."""
    episode = await begin(server, api, ["one", "two"])
    client = of(sdk, episode)
    first = await client.responses.create(model="solver", input="a", store=False)
    await client.responses.create(model="solver", input="b", previous_response_id=first.id)
    check_one_timeline(await graph_of(server, api, episode))


@pytest.mark.parametrize("keep", ["content", "encrypted", "think tags", "nothing"])
async def test_reasoning_may_come_back_in_any_way_or_not_at_all(
    server: ScriptedServer, api: Api, sdk: AsyncOpenAI, keep: str
) -> None:
    episode = await begin(server, api, [THOUGHT, LAST])
    client = of(sdk, episode)
    one = await client.responses.create(**WANTED, input=QUESTION, include=["reasoning.encrypted_content"])
    thought, *rest = one.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    told: dict[str, list[Any]] = {
        "content": [thought.model_copy(update={"encrypted_content": None})],
        "encrypted": [thought.model_copy(update={"content": None})],
        "think tags": [{"role": "assistant", "content": f"<think>\n{thought.content[0].text}\n</think>"}],
        "nothing": [],
    }
    result: Any = {"type": "function_call_output", "call_id": check_first(one, THOUGHT).call_id, "output": "5"}
    await client.responses.create(**WANTED, input=[{"role": "user", "content": QUESTION}, *told[keep], *rest, result])
    check_one_timeline(await graph_of(server, api, episode))


async def test_a_history_may_change_dialect(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    """A turn that began as a response goes on as a chat completion: one conversation, one timeline."""
    episode = await begin(server, api, [THOUGHT, LAST])
    client = of(sdk, episode)
    one = await client.responses.create(**WANTED, input=QUESTION)
    call = check_first(one, THOUGHT)
    function = {"name": call.name, "arguments": call.arguments}
    tool = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": one.output_text,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "5"},
    ]
    await client.chat.completions.create(model="solver", messages=messages, tools=[tool])  # pyright: ignore[reportArgumentType]
    check_one_timeline(await graph_of(server, api, episode))


async def test_the_events_of_a_stream(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    episode = await begin(server, api, [THOUGHT])
    text: dict[str, str] = {}
    kinds: list[str] = []
    numbers: list[int] = []
    stream = await of(sdk, episode).responses.create(**WANTED, input=QUESTION, stream=True)
    async for event in stream:
        numbers.append(event.sequence_number)  # pyright: ignore[reportAttributeAccessIssue]
        if event.type.endswith(".delta"):
            text[event.type] = text.get(event.type, "") + getattr(event, "delta", "")
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type)
    assert numbers == list(range(len(numbers)))
    assert (kinds[0], kinds[1], kinds[-1]) == ("response.created", "response.in_progress", "response.completed")
    assert text == {
        "response.reasoning_text.delta": "I should add.",
        "response.output_text.delta": "Let me add: é",
        "response.function_call_arguments.delta": '{"b":3,"a":2,"note":"é"}',
    }
    await api.abort(episode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_reply_that_the_limit_cut_is_incomplete(
    server: ScriptedServer, api: Api, sdk: AsyncOpenAI, stream: bool
) -> None:
    episode = await begin(server, api, ["one two three"])
    response: Any = await of(sdk, episode).responses.create(
        model="solver", input=QUESTION, max_output_tokens=3, stream=stream
    )
    if stream:
        last: Any = [event async for event in response][-1]
        assert last.type == "response.incomplete"
        response = last.response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 3
    await api.abort(episode)


class Sum(BaseModel):
    """What a structured answer is parsed into."""

    total: int


async def test_structured_output_and_required_tools(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    episode = await begin(server, api, ['{"total": 5}', CALL, CALL])
    client = of(sdk, episode)
    parsed = await client.responses.parse(model="solver", input=QUESTION, text_format=Sum)
    assert parsed.output_parsed == Sum(total=5)
    choices: Any = ("required", {"type": "function", "name": "add"})
    for choice in choices:
        response = await client.responses.create(**WANTED, input=QUESTION, tool_choice=choice)
        assert [item.type for item in response.output] == ["function_call"]
    await api.abort(episode)


async def test_an_error_before_the_first_event_is_a_status(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    episode = await begin(server, api, [Reply("broken", FinishReason.ERROR)])
    with pytest.raises(openai.APIStatusError, match="broken") as caught:
        await ask(of(sdk, episode), stream=True, input=QUESTION)
    assert caught.value.status_code == 503
    await api.abort(episode)


async def test_an_error_in_the_stream_is_the_sdks_own(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    episode = await begin(server, api, [Reply("abcdef", hold_after=3)])
    text = ""
    stream = await of(sdk, episode).responses.create(model="solver", input=QUESTION, stream=True)
    with pytest.raises(openai.APIError, match="ended while this call ran") as caught:
        async for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
            if text == "abc" and event.type == "response.output_text.delta":
                await api.abort(episode)
    assert text == "abc"
    assert caught.value.code == "episode_closed"


async def test_refusals_are_the_sdks_own(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    episode = await begin(server, api, [LAST])
    client = of(sdk, episode)
    with pytest.raises(openai.AuthenticationError):
        await sdk.responses.create(model="solver", input=QUESTION)
    with pytest.raises(openai.NotFoundError, match="no policy 'gpt-5'"):
        await client.responses.create(model="gpt-5", input=QUESTION)
    with pytest.raises(openai.NotFoundError, match="send the whole conversation") as lost:
        await client.responses.create(model="solver", input=QUESTION, previous_response_id="resp_of_nobody")
    assert (lost.value.code, lost.value.param) == ("previous_response_not_found", "previous_response_id")
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://example.com/a.png"}]}]
    with pytest.raises(openai.BadRequestError, match="'input_image'") as caught:
        await client.responses.create(model="solver", input=image)
    assert (caught.value.code, caught.value.param) == ("unsupported_field", "input[0].content[0]")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    assert (await api.finish(episode)).status == 200
    with pytest.raises(openai.ConflictError):
        await client.responses.create(model="solver", input=QUESTION)


async def test_logprobs_are_those_of_the_turn(server: ScriptedServer, api: Api, sdk: AsyncOpenAI) -> None:
    episode = await begin(server, api, [LAST])
    response = await of(sdk, episode).responses.create(
        model="solver", input=QUESTION, include=["message.output_text.logprobs"]
    )
    (item,) = response.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    (turn,) = (await graph_of(server, api, episode)).turns
    assert [entry.logprob for entry in part.logprobs] == pytest.approx(turn.logprobs.tolist(), abs=1e-6)
