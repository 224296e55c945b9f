"""The official ``openai`` SDK, unmodified, against an episode's ``base_url`` and ``api_key``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from harness import QUESTION, Api, Begun, Server, read_graph
from openai import AsyncOpenAI, OpenAI

from wingbeat.core.types import FinishReason, Provenance
from wingbeat.environments.calculator import CALC_TOOL

TOOLS: Any = [CALC_TOOL]
MESSAGES: Any = QUESTION


@pytest.fixture
async def sdk(api: Api) -> AsyncIterator[AsyncOpenAI]:
    """A client without a key; tests add their episode's."""
    async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def of(client: AsyncOpenAI, episode: Begun) -> AsyncOpenAI:
    return client.with_options(api_key=episode.key)


def tool_result(call: Any, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


async def test_two_turns_with_a_tool_extend_exactly_the_sampled_tokens(
    api: Api, sdk: AsyncOpenAI, server: Server
) -> None:
    episode = await api.begin()
    client = of(sdk, episode)
    first = await client.chat.completions.create(
        model="solver", messages=MESSAGES, tools=TOOLS, max_tokens=24, logprobs=True
    )
    reply = first.choices[0].message
    messages: list[Any] = [*MESSAGES, reply.model_dump(exclude_none=True)]
    if reply.tool_calls:
        assert first.choices[0].finish_reason == "tool_calls"
        assert "expression" in json.loads(reply.tool_calls[0].function.arguments)
        messages += [tool_result(call, "3") for call in reply.tool_calls]
    else:
        messages.append({"role": "user", "content": "what is 2 plus 2 ?"})
    second = await client.chat.completions.create(model="solver", messages=messages, tools=TOOLS, max_tokens=24)
    assert (await api.finish(episode)).body["num_turns"] == 2

    graph = read_graph(server, episode.id, episode.attempt)
    one, two = graph.turns
    assert (one.turn_id, two.turn_id) == (first.id, second.id)
    assert two.parent_id == one.turn_id
    assert (one.fork_reason, two.fork_reason) == ("", "")
    extended = [*graph.prompt_ids(one), *one.sampled, *two.segment]
    assert graph.prompt_ids(two).tolist() == extended
    assert first.usage is not None
    assert second.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (one.prompt_length, one.num_sampled)
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (two.prompt_length, two.num_sampled)
    assert {provenance for provenance, _ in two.segment_runs} <= {Provenance.RENDERED, Provenance.FORCED}
    told = first.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [token.logprob for token in told.content] == pytest.approx(one.logprobs.tolist(), abs=1e-6)
    assert all(token.logprob <= 0 for token in told.content)


async def test_a_tool_call_is_parsed_and_its_answer_continues_it(api: Api, sdk: AsyncOpenAI) -> None:
    """Greedily the model calls the tool: it was made to."""
    episode = await api.begin(split="eval")
    completion = await of(sdk, episode).chat.completions.create(
        model="solver", messages=MESSAGES, tools=TOOLS, max_tokens=24, temperature=0
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "calc"
    assert set(json.loads(call.function.arguments)) == {"expression"}
    await api.abort(episode)


async def test_the_synchronous_client_works_too(server: Server, api: Api) -> None:
    """Its calls block, so it begins its episode by itself."""
    import urllib.request

    def post(path: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    begun = post("/api/episodes", api.begin_body())
    with OpenAI(base_url=begun["base_url"], api_key=begun["api_key"], max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["solver"]
        assert client.models.retrieve("solver").owned_by == "wingbeat"
        completion = client.chat.completions.create(model="solver", messages=MESSAGES, max_tokens=8)
        with client.chat.completions.create(model="solver", messages=MESSAGES, max_tokens=8, stream=True) as stream:
            parts = list(stream)
    assert completion.choices[0].finish_reason in ("stop", "length")
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    finished = post(f"/api/episodes/{begun['episode_id']}/finish", {"rewards": 1.0}, begun["api_key"])
    assert finished["num_turns"] == 2


async def collect(stream: Any) -> tuple[str, list[tuple[str, str]], str, Any]:
    """(text, tool calls as (name, arguments), finish reason, usage) of a stream's first choice."""
    text, reason, usage = "", "", None
    calls: dict[int, list[str]] = {}
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
    return text, [(name, arguments) for name, arguments in calls.values()], reason, usage


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["text", "tools"])
async def test_streaming_tells_the_same_as_not_streaming(api: Api, sdk: AsyncOpenAI, tools: Any) -> None:
    episode = await api.begin(split="eval")
    client = of(sdk, episode)
    for seed in range(3):
        wanted: dict[str, Any] = {"model": "solver", "messages": MESSAGES, "max_tokens": 24, "seed": seed}
        if tools is not None:
            wanted["tools"] = tools
        whole = await client.chat.completions.create(**wanted)
        stream = await client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True})
        text, calls, reason, usage = await collect(stream)
        message = whole.choices[0].message
        assert text.strip() == (message.content or "").strip()
        assert calls == [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        assert reason == whole.choices[0].finish_reason
        assert usage is not None
        assert whole.usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
    await api.abort(episode)


async def test_usage_is_streamed_only_when_asked_for(api: Api, sdk: AsyncOpenAI) -> None:
    episode = await api.begin(split="eval")
    stream = await of(sdk, episode).chat.completions.create(
        model="solver", messages=MESSAGES, max_tokens=8, stream=True
    )
    assert (await collect(stream))[3] is None
    await api.abort(episode)


async def test_n_choices_are_siblings(api: Api, sdk: AsyncOpenAI, server: Server) -> None:
    episode = await api.begin()
    completion = await of(sdk, episode).chat.completions.create(
        model="solver:voter", messages=MESSAGES, max_tokens=8, n=3
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert completion.model == "solver:voter"
    assert (await api.finish(episode)).body["num_turns"] == 3
    turns = read_graph(server, episode.id, episode.attempt).turns
    assert {turn.parent_id for turn in turns} == {None}
    assert {turn.agent for turn in turns} == {"voter"}
    assert completion.usage is not None
    assert completion.usage.completion_tokens == sum(turn.num_sampled for turn in turns)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_stop_string_ends_the_turn(api: Api, sdk: AsyncOpenAI, server: Server, stream: bool) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    wanted: dict[str, Any] = {"model": "babbler", "messages": MESSAGES, "max_tokens": 2000, "seed": 5}
    client = of(sdk, episode)
    full = (await client.chat.completions.create(**{**wanted, "max_tokens": 200})).choices[0].message.content
    stop = full[20:23]
    if stream:
        text, _, reason, _ = await collect(await client.chat.completions.create(**wanted, stop=stop, stream=True))
    else:
        (choice,) = (await client.chat.completions.create(**wanted, stop=[stop, "never"])).choices
        text, reason = choice.message.content or "", choice.finish_reason
    assert text == full[: full.index(stop)]
    assert reason == "stop"
    assert (await api.finish(episode)).status == 200
    last = read_graph(server, episode.id, episode.attempt).turns[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.num_sampled == full.index(stop) + len(stop)


async def test_training_overrides_the_temperature_and_says_so(api: Api, sdk: AsyncOpenAI) -> None:
    episode = await api.begin()
    client = of(sdk, episode)
    raw = await client.chat.completions.with_raw_response.create(
        model="solver", messages=MESSAGES, max_tokens=8, temperature=0
    )
    assert raw.headers["x-wingbeat-temperature"] == "1"
    assert raw.headers["x-wingbeat-ignored"] == "temperature=0"
    agreed = await client.chat.completions.with_raw_response.create(
        model="solver", messages=MESSAGES, max_tokens=8, temperature=1
    )
    assert "x-wingbeat-ignored" not in agreed.headers
    await api.abort(episode)


async def test_evaluation_obeys_temperature_zero(api: Api, sdk: AsyncOpenAI) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    client = of(sdk, episode)
    wanted: dict[str, Any] = {"model": "babbler", "messages": MESSAGES, "max_tokens": 64}
    raw = await client.chat.completions.with_raw_response.create(**wanted, temperature=0)
    assert "x-wingbeat-temperature" not in raw.headers
    greedy = {(await client.chat.completions.create(**wanted, temperature=0)).choices[0].message.content}
    greedy.add(raw.parse().choices[0].message.content)
    sampled = (await client.chat.completions.create(**wanted, temperature=1)).choices[0].message.content
    assert len(greedy) == 1
    assert sampled not in greedy
    await api.abort(episode)


async def test_errors_arrive_as_the_sdks_own(api: Api, sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="belongs to no episode"):
        await sdk.models.list()
    episode = await api.begin()
    with pytest.raises(openai.NotFoundError, match="no policy 'gpt-4o'"):
        await of(sdk, episode).chat.completions.create(model="gpt-4o", messages=MESSAGES)
    await api.finish(episode)
    with pytest.raises(openai.ConflictError, match="takes no more model calls"):
        await of(sdk, episode).chat.completions.create(model="solver", messages=MESSAGES)


async def test_two_completions_are_two_text_turns_of_one_timeline(api: Api, sdk: AsyncOpenAI, server: Server) -> None:
    episode = await api.begin(policies=["solver", "babbler"])
    client = of(sdk, episode)
    first = await client.completions.create(model="babbler", prompt="a list: ", max_tokens=8, logprobs=1)
    prompt = f"a list: {first.choices[0].text}, and "
    text = ""
    async for part in await client.completions.create(model="babbler", prompt=prompt, max_tokens=8, stream=True):
        text += part.choices[0].text
    assert len(text) == len(first.choices[0].text) == 8
    assert first.choices[0].logprobs is not None
    assert (await api.finish(episode)).status == 200
    graph = read_graph(server, episode.id, episode.attempt)
    one, two = graph.turns
    assert (one.turn_id, two.parent_id) == (first.id, one.turn_id)
    assert first.choices[0].logprobs.token_logprobs == pytest.approx(one.logprobs.tolist(), abs=1e-6)
    assert graph.prompt_ids(two).tolist() == [*one.segment, *one.sampled, *two.segment]


async def test_token_ids_in_and_out(api: Api, sdk: AsyncOpenAI, server: Server) -> None:
    episode = await api.begin(policies=["solver", "babbler"])
    client, wanted = of(sdk, episode), {"return_token_ids": True}
    first = await client.completions.create(model="babbler", prompt=[5, 6], max_tokens=4, extra_body=wanted)
    told: Any = first.choices[0].model_dump()
    assert told["prompt_token_ids"] == [5, 6] and len(told["token_ids"]) == 4
    again = [5, 6, *told["token_ids"], 7]
    await client.completions.create(model="babbler", prompt=again, max_tokens=4)
    chat: Any = await client.chat.completions.create(
        model="babbler", messages=MESSAGES, max_tokens=4, extra_body=wanted
    )
    assert (await api.finish(episode)).status == 200
    one, two, three = read_graph(server, episode.id, episode.attempt).turns
    assert one.sampled.tolist() == told["token_ids"]
    assert (two.parent_id, two.segment.tolist()) == (one.turn_id, [7])
    assert chat.choices[0].model_dump()["token_ids"] == three.sampled.tolist()


FORCED = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "calc"}},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", FORCED)
async def test_a_model_that_only_babbles_calls_the_tool_when_it_must(
    api: Api, sdk: AsyncOpenAI, server: Server, choice: str, stream: bool
) -> None:
    """A training episode: what could have been drawn is stored with every token, and nothing is lost to training.

    The grammar lets it think before, for ever if it likes; that ends at the limit.
    """
    schema = {
        "type": "object",
        "properties": {"op": {"enum": ["plus", "minus"]}},
        "required": ["op"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "calc", "parameters": schema}}]
    episode = await api.begin(policies=["solver", "babbler"])
    wanted: Any = {"model": "babbler", "messages": MESSAGES, "tools": tools, "tool_choice": FORCED[choice]}
    ended = 0
    for seed in range(8):
        answer: Any = await of(sdk, episode).chat.completions.create(
            **wanted, parallel_tool_calls=False, max_tokens=120, stream=stream, seed=seed
        )
        if stream:
            _, calls, reason, _ = await collect(answer)
        else:
            reason = answer.choices[0].finish_reason
            calls = [(c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls or ()]
        assert reason in ("tool_calls", "length")
        if reason == "tool_calls":
            ended += 1
            assert [name for name, _ in calls] == ["calc"]
            assert json.loads(calls[0][1])["op"] in ("plus", "minus")
    assert ended > 0
    assert (await api.finish(episode)).status == 200
    for turn in read_graph(server, episode.id, episode.attempt).turns:
        assert turn.trainable_T.all()
        assert turn.support_table
        assert (turn.support_index >= 0).any()


async def test_a_json_schema_is_kept_to(api: Api, sdk: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    episode = await api.begin(policies=["solver", "babbler"])
    client = of(sdk, episode)
    for wanted in ({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, {"type": "json_object"}):
        form: Any = wanted
        answer = await client.chat.completions.create(
            model="babbler", messages=MESSAGES, response_format=form, max_tokens=200
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    await api.abort(episode)


async def test_top_p_trains_because_the_support_is_stored(api: Api, sdk: AsyncOpenAI, server: Server) -> None:
    episode = await api.begin()
    await of(sdk, episode).chat.completions.create(model="solver", messages=MESSAGES, max_tokens=16, top_p=0.9)
    assert (await api.finish(episode)).status == 200
    (turn,) = read_graph(server, episode.id, episode.attempt).turns
    assert turn.trainable_T.all() and (turn.logprobs <= 0).all()
    assert len(turn.support_index) == turn.num_sampled


async def test_the_key_in_the_url(api: Api, server: Server) -> None:
    episode = await api.begin()
    async with AsyncOpenAI(base_url=f"{api.url}/s/{episode.key}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["solver"]
        answer = await client.chat.completions.create(model="solver", messages=MESSAGES, max_tokens=8)
    assert answer.id == f"chatcmpl-{episode.id}-1-0"
    await api.abort(episode)
