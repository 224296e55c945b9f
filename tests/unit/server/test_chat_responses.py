"""Answers as the official client's own types read them, from a gateway on a fake engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from wingbeat.core.errors import (
    ContextOverflow,
    EpisodeClosed,
    NoEngine,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownPolicy,
)
from wingbeat.core.support import encode_support
from wingbeat.core.types import FinishReason, Split, Task
from wingbeat.core.worker_protocol import Generate, TokenChunk
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.dialects.chat import CHAT
from wingbeat.server.calls.gateway import unknown_policy
from wingbeat.server.calls.model_call import Choice, TextDelta
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.server.http.error_answers import error_body, error_headers, error_response
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.timelines import count_untrainable

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


class Talk:
    """An episode on a desk with one engine that says what the test tells it."""

    def __init__(self, desk: Any, join_engine: Any, split: Split) -> None:
        self.desk = desk
        self.engine = join_engine(desk.engines)
        self.engine.serve()
        self.template = desk.solver.template
        group = GroupSpec("g", Task("src", "t"), split, 1, ("solver",), {"solver": 0})
        self.episode = OpenEpisode(
            "ep", 1, group, {"solver": None}, "", "digest", 100.0, 0.0, 0.0, graph=EpisodeGraph("ep")
        )

    def prepare(self, **fields: Any) -> Any:
        body = {"model": "solver", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.desk.gateway.prepare(self.episode, CHAT.parse(body))

    async def reply(self, text: str, *, finish: FinishReason = FinishReason.STOP, number: int = 0) -> None:
        """Say ``text`` to the request of this number, token by token where it streams."""
        for _ in range(10):
            await asyncio.sleep(0)
        sent = self.engine.of(Generate)[number]
        ids = self.template.encode(text)
        pieces = [[i] for i in ids] if sent.stream else [ids]
        for index, piece in enumerate(pieces):
            self.engine.say(sent.request_id, *piece, version=index, finish=finish if index == len(pieces) - 1 else None)

    async def complete(self, text: str, *, finish: FinishReason = FinishReason.STOP, **fields: Any) -> ChatCompletion:
        prepared = self.prepare(**fields)
        call = asyncio.create_task(self.desk.gateway.complete(self.episode, prepared))
        for number in range(prepared.call.n):
            await self.reply(text, finish=finish, number=number)
        return ChatCompletion.model_validate(json.loads(CHAT.answer(prepared, await call)), strict=True)

    async def stream(self, text: str, **fields: Any) -> list[ChatCompletionChunk]:
        prepared = self.prepare(stream=True, **fields)
        writer, frames, done = CHAT.events(prepared), [], []
        speaking = asyncio.create_task(self.reply(text))
        async for item in self.desk.gateway.stream(self.episode, prepared):
            if isinstance(item, Choice):
                done.append(item)
                frames.append(writer.choice(item))
            else:
                frames.append(writer.delta(item) if isinstance(item, TextDelta) else writer.begin(prepared.turn_ids[0]))
        frames.append(writer.end(done).removesuffix(b"data: [DONE]\n\n"))
        await speaking
        events = b"".join(frames).decode().removesuffix("\n\n").split("\n\n")
        return [ChatCompletionChunk.model_validate(json.loads(e.removeprefix("data: ")), strict=True) for e in events]


@pytest.fixture
def open_talk(open_desk: Any, join_engine: Any) -> Any:
    return lambda split=Split.TRAIN: Talk(open_desk(), join_engine, split)


async def test_a_plain_answer(open_talk: Any) -> None:
    talk = open_talk()
    answer = await talk.complete("hello<|im_end|>", logprobs=True)
    (choice,) = answer.choices
    assert answer.id == "chatcmpl-ep-1-0" and answer.model == "solver"
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content][:2] == ["h", "e"]
    assert {entry.logprob for entry in choice.logprobs.content} == {-0.5}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert talk.episode.graph.num_sampled_tokens == 6


async def test_tool_calls(open_talk: Any) -> None:
    text = 'see <tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call><|im_end|>'
    answer = await open_talk().complete(text, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "see" and message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments) == {"x": 1}
    assert call.id.startswith("call_")


async def test_several_choices_are_several_turns(open_talk: Any) -> None:
    talk = open_talk(Split.EVAL)
    answer = await talk.complete("a<|im_end|>", n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert talk.episode.graph.num_turns == 3
    assert [m.seed for m in talk.engine.of(Generate)] == [7, 8, 9]


async def test_training_ignores_a_fixed_seed_and_says_so(open_talk: Any) -> None:
    prepared = open_talk(Split.TRAIN).prepare(seed=7, temperature=0)
    assert prepared.sampling.seed is None
    assert prepared.enforced["x-wingbeat-ignored"] == "temperature=0, seed=7"


async def test_a_turn_cut_for_length_is_told_and_remembered(open_talk: Any) -> None:
    talk = open_talk()
    answer = await talk.complete("abc", finish=FinishReason.LENGTH, model="solver:critic")
    assert answer.choices[0].finish_reason == "length" and answer.model == "solver:critic"
    assert talk.episode.truncated == {("solver", "critic")}


async def test_a_stream_is_role_text_end_and_usage(open_talk: Any) -> None:
    chunks = await open_talk().stream("hey €<|im_end|>", stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "hey €"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_streamed_tool_call_comes_whole(open_talk: Any) -> None:
    text = '<tool_call>{"name": "calc", "arguments": {}}</tool_call><|im_end|>'
    chunks = await open_talk().stream(text, tools=TOOLS, logprobs=True)
    calls = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
    assert len(calls) == 1 and calls[0].function is not None and calls[0].function.name == "calc"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"


async def test_reasoning_is_beside_the_content(open_talk: Any) -> None:
    answer = await open_talk().complete("<think>why</think>\nso<|im_end|>")
    message = answer.choices[0].message
    assert message.content == "so"
    assert message.model_dump()["reasoning_content"] == "why"


async def test_a_stop_string_ends_the_turn_and_its_engine_request(open_talk: Any) -> None:
    talk = open_talk()
    call = asyncio.create_task(talk.desk.gateway.complete(talk.episode, talk.prepare(stop=["X"])))
    await talk.reply("aXb<|im_end|>")
    (choice,) = await call
    assert choice.reply.content == "a" and choice.finish_reason is FinishReason.STOP
    assert talk.template.decode(choice.token_ids) == "aX"
    assert talk.desk.engines.in_flight == 0


async def test_training_uses_the_policys_temperature_and_evaluation_the_callers(open_talk: Any) -> None:
    training = open_talk().prepare(temperature=0)
    assert training.sampling.temperature == 1.0
    assert training.enforced == {"x-wingbeat-temperature": "1", "x-wingbeat-ignored": "temperature=0"}
    evaluation = open_talk(Split.EVAL).prepare(temperature=0, top_p=0.5)
    assert (evaluation.sampling.temperature, evaluation.sampling.top_p, evaluation.enforced) == (0.0, 0.5, {})


async def test_without_a_limit_of_the_caller_that_of_the_policy_holds(open_desk: Any, join_engine: Any) -> None:
    desk = open_desk(policies={"solver": {"context_tokens": 64, "sampling": {"max_tokens": 7}}})
    talk = Talk(desk, join_engine, Split.TRAIN)
    assert [talk.prepare(**fields).sampling.max_tokens for fields in ({}, {"max_tokens": 9})] == [7, 9]


async def test_the_context_bounds_the_answer_and_refuses_a_prompt_that_fills_it(open_talk: Any) -> None:
    prepared = open_talk().prepare(max_tokens=1000)
    assert prepared.sampling.max_tokens == 64 - len(prepared.plan.prompt_ids)
    assert open_talk().prepare(max_tokens=3).sampling.max_tokens == 3
    with pytest.raises(ContextOverflow, match="context_tokens"):
        open_talk().prepare(messages=[{"role": "user", "content": "x" * 100}])
    with pytest.raises(UnknownPolicy, match="it has solver"):
        open_talk().prepare(model="judge")
    assert "none of this server's" in unknown_policy("solver", []).message  # a key of other policies only


async def test_a_cancelled_call_keeps_what_was_streamed_as_an_aborted_turn(open_talk: Any) -> None:
    talk = open_talk()
    stream = talk.desk.gateway.stream(talk.episode, talk.prepare(stream=True))
    first = asyncio.create_task(anext(stream))
    for _ in range(10):
        await asyncio.sleep(0)
    talk.engine.say(talk.engine.of(Generate)[0].request_id, *talk.template.encode("ab"))
    await first
    assert (await anext(stream)).text == "ab"
    await stream.aclose()
    (turn,) = talk.episode.graph.turns
    assert turn.finish_reason is FinishReason.ABORT and turn.num_sampled == 2
    assert talk.desk.captured == [turn.turn_id]
    assert talk.desk.engines.in_flight == 0


async def test_an_ended_episode_takes_no_more_turns(open_talk: Any) -> None:
    talk = open_talk()
    call = asyncio.create_task(talk.desk.gateway.complete(talk.episode, talk.prepare(stop=["X"])))
    for _ in range(10):
        await asyncio.sleep(0)
    talk.engine.say(talk.engine.of(Generate)[0].request_id, 1, 2)
    await asyncio.sleep(0)
    talk.episode.become(EpisodeState.ABORTED)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert talk.episode.graph.num_turns == 0


async def test_an_abandoned_stream_keeps_what_was_sent_so_that_its_caller_can_go_on(open_talk: Any) -> None:
    """Held back: the space, which may yet be stripped, and what may become a tool call."""
    talk = open_talk()
    stream = talk.desk.gateway.stream(talk.episode, talk.prepare(stream=True, tools=TOOLS))
    first = asyncio.create_task(anext(stream))
    for _ in range(10):
        await asyncio.sleep(0)
    talk.engine.say(talk.engine.of(Generate)[0].request_id, *talk.template.encode("ab <tool_call>{"))
    await first
    assert (await anext(stream)).text == "ab"
    await stream.aclose()
    (turn,) = talk.episode.graph.turns
    assert (turn.reply.content, talk.template.decode(turn.sampled.tolist())) == ("ab", "ab")


async def test_an_engine_that_gives_up_is_an_error_and_no_answer(open_talk: Any) -> None:
    talk = open_talk()
    call = asyncio.create_task(talk.desk.gateway.complete(talk.episode, talk.prepare()))
    await talk.reply("ab", finish=FinishReason.ABORT)
    with pytest.raises(UnavailableError, match="gave this generation up"):
        await call
    assert [turn.finish_reason for turn in talk.episode.graph.turns] == [FinishReason.ABORT]


async def test_reasoning_is_streamed_as_it_becomes_final_and_before_the_content(open_talk: Any) -> None:
    chunks = await open_talk().stream("<think>why not</think>\nso<|im_end|>")
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks if chunk.choices]
    told = [key for delta in deltas[1:] for key in delta]
    assert told == sorted(told, reverse=True), "reasoning_content comes before content"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why not"
    assert "".join(delta.get("content", "") for delta in deltas) == "so"
    assert sum("reasoning_content" in delta for delta in deltas) > 3


async def test_token_ids_are_told_to_those_who_ask(open_talk: Any) -> None:
    talk = open_talk()
    answer = await talk.complete("hi<|im_end|>", return_token_ids=True)
    told = answer.choices[0].model_dump()
    (turn,) = talk.episode.graph.turns
    assert told["token_ids"] == turn.sampled.tolist()
    assert told["prompt_token_ids"] == talk.episode.graph.prompt_ids(turn).tolist()
    assert "token_ids" not in (await open_talk().complete("hi<|im_end|>")).choices[0].model_dump()


async def test_only_one_call_where_the_caller_wants_one(open_talk: Any) -> None:
    talk = open_talk()
    call = '<tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call>'
    answer = await talk.complete(f"a{call}\n{call}<|im_end|>", tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    (turn,) = talk.episode.graph.turns
    assert talk.template.decode(turn.sampled.tolist()) == f"a{call}\n"
    both = await open_talk().complete(f"a{call}\n{call}<|im_end|>", tools=TOOLS)
    assert len(both.choices[0].message.tool_calls or ()) == 2


async def test_without_tools_to_choose_a_call_is_text(open_talk: Any) -> None:
    talk = open_talk()
    call = '<tool_call>{"name": "calc", "arguments": {}}</tool_call>'
    answer = await talk.complete(f"{call}<|im_end|>", tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (call, "stop")


# --- what is drawn from a part of the vocabulary ---------------------------------------------------


async def sampled(talk: Any, supports: tuple[bytes, ...], **fields: Any) -> Any:
    """The one turn of a call whose engine said two tokens with these supports."""
    call = asyncio.create_task(talk.desk.gateway.complete(talk.episode, talk.prepare(**fields)))
    for _ in range(10):
        await asyncio.sleep(0)
    request = talk.engine.of(Generate)[0].request_id
    chunk = TokenChunk(request, (5, 6), (-0.5, -1.0), 0, FinishReason.STOP, "", supports)
    talk.desk.engines.receive(talk.engine.link, [chunk])
    await call
    (turn,) = talk.episode.graph.turns
    return turn


@pytest.mark.parametrize("fields", [{"top_p": 0.5}, {"top_k": 3}, {"tools": TOOLS, "tool_choice": "required"}])
async def test_supports_are_kept_with_tokens_drawn_from_a_part_of_the_vocabulary(
    open_talk: Any, fields: dict[str, Any]
) -> None:
    blob = encode_support(np.arange(300) < 7)
    turn = await sampled(open_talk(), (blob, b""), **fields)
    assert turn.support_table == (blob,) and turn.support_index.tolist() == [0, -1]
    assert turn.trainable_T.all()


async def test_a_token_without_its_support_is_never_trained(open_talk: Any) -> None:
    talk = open_talk()
    turn = await sampled(talk, (), top_p=0.5)
    assert not turn.trainable_T.any()
    assert count_untrainable(talk.episode.graph, policy="solver") == {"missing_logprob": 2}


async def test_free_sampling_needs_no_supports(open_talk: Any) -> None:
    turn = await sampled(open_talk(), ())
    assert turn.trainable_T.all() and turn.support_table == ()


async def test_what_the_reply_must_match_goes_to_the_engine(open_talk: Any) -> None:
    free = open_talk().prepare(tools=TOOLS).sampling
    forced = open_talk().prepare(tools=TOOLS, tool_choice="required").sampling
    json_only = open_talk().prepare(response_format={"type": "json_object"}).sampling
    assert free.grammar == "" and "calc" in forced.grammar and json_only.grammar not in ("", forced.grammar)


def test_errors_have_the_clients_shape() -> None:
    error = RequestError("bad", param="n")
    shape = {"error": {"message": "bad", "type": "invalid_request_error", "code": "invalid_request", "param": "n"}}
    assert error_body(error) == json.loads(CHAT.error(error)) == shape
    answer = error_response(OverloadedError("full"), error_headers(OverloadedError("full", retry_after_s=3)))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert json.loads(bytes(answer.body))["error"]["type"] == "rate_limit_error"


def test_sdks_are_told_where_no_retry_can_help() -> None:
    """They repeat 409 and 5xx by themselves."""
    assert error_headers(EpisodeClosed("over")) == {"x-should-retry": "false"}
    assert error_headers(NoEngine("none")) == {"retry-after": "1"}
    assert error_headers(RequestError("bad")) == {"x-should-retry": "false"}
