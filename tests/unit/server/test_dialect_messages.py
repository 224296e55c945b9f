"""Anthropic's messages: what is parsed, and answers as the official SDK's own models and accumulator read them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared.error_response import ErrorResponse
from pydantic import TypeAdapter

from wingbeat.core.errors import (
    ContextOverflow,
    InvalidToolSchema,
    NoEngine,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnknownPolicy,
    UnsupportedField,
    WingbeatError,
)
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.server.calls.dialects.messages import MESSAGES
from wingbeat.server.calls.dialects.messages.parse import NO_EFFECT, REFUSED_UNLESS
from wingbeat.server.calls.model_call import ChatPrompt, Choice, ModelCall, Prepared, TextDelta, ToolChoice
from wingbeat.tracking.messages import Message, ToolCall, parse_messages

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"b": 2, "a": 1}, "caller": None}
CALL = ToolCall.of("call_1", name="add", arguments='{"b":3,  "a": 9007199254740993, "note":"é"}')


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "solver", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], **fields}


def parse(**fields: Any) -> ModelCall:
    return MESSAGES.parse(body(**fields))


def told(*messages: Any, **fields: Any) -> tuple[Message, ...]:
    """The conversation of these messages."""
    prompt = parse(messages=list(messages), **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(call_id: str = "call_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


# --- requests -----------------------------------------------------------------------------------------


def test_a_whole_request() -> None:
    call = parse(
        model="solver:judge",
        system="Be brief.",
        tools=[TOOL],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stream=True,
        max_tokens=128000,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert (call.policy, call.agent, call.max_tokens) == ("solver", "judge", 128000)
    assert (call.temperature, call.top_p, call.top_k, call.stop, call.stream) == (0.5, 0.9, 40, ("END",), True)
    assert call.tools == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
    ]
    assert call.prompt == ChatPrompt((Message("system", "Be brief."), Message("user", "hi")))
    assert (call.tool_choice, call.one_tool_call, call.schema) == (ToolChoice(), False, None)


def test_a_history_equals_that_of_the_chat_dialect() -> None:
    chat = parse_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "content": "Let me add.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2.0}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        ]
    )
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "whatever"}
    ours = told(
        {"role": "user", "content": "1 + 2?"},
        assistant(thought, text("Let me add.", citations=None), USE),
        user(result(content=[text("3")], is_error=False)),
        system=[text("Be ", cache_control={"type": "ephemeral"}), text("brief.")],
    )
    assert ours == chat


def test_tool_results_and_text_keep_the_order_in_which_they_came() -> None:
    assert told(user(result("a", content="1"), result("b"), text("and "), text("now?"))) == (
        Message("tool", "1", tool_call_id="a"),
        Message("tool", "", tool_call_id="b"),
        Message("user", "and now?"),
    )
    assert [m.role for m in told(user(text("first"), result("a"), text("last")))] == ["user", "tool", "user"]


def test_a_failed_tool_without_a_word_is_told_as_an_error() -> None:
    assert told(user(result(is_error=True)))[0].content == "error"
    assert told(user(result(is_error=True, content="no such file")))[0].content == "no such file"


def test_redacted_thinking_is_reasoning_that_was_dropped() -> None:
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    assert told(assistant(redacted, text("a")), user(text("b")))[0] == Message("assistant", "a")


def test_a_system_message_in_the_middle() -> None:
    later = {"role": "system", "content": [text("Now in French.")]}
    assert told(user(text("a")), later) == (Message("user", "a"), Message("system", "Now in French."))


def test_threads() -> None:
    created = parse(thread={"type": "create"}, system="s", tools=[TOOL]).prompt
    assert created == ChatPrompt((Message("system", "s"), Message("user", "hi")))
    call = parse(
        thread={"type": "continue", "previous_message_id": "msg_7"},
        messages=[user(result(content="3"))],
        tool_choice={"type": "tool", "name": "add"},
    )
    assert call.prompt == ChatPrompt((Message("tool", "3", tool_call_id="call_1"),), "msg_7", keeps_tools=True)
    assert (call.tools, call.tool_choice) == (None, ToolChoice("required", ("add",)))


@pytest.mark.parametrize("field", ["system", "tools"])
def test_a_thread_keeps_what_it_was_created_with(field: str) -> None:
    value = {"system": "s", "tools": [TOOL]}[field]
    with pytest.raises(RequestError, match=f"`{field}` belongs to the call that created the thread"):
        parse(thread={"type": "continue", "previous_message_id": "msg_7"}, **{field: value})


@pytest.mark.parametrize(
    ("wire", "choice", "one"),
    [
        ({"type": "auto"}, ToolChoice(), False),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), True),
        ({"type": "tool", "name": "add"}, ToolChoice("required", ("add",)), False),
        ({"type": "none"}, ToolChoice("none"), False),
    ],
)
def test_tool_choices(wire: dict[str, Any], choice: ToolChoice, one: bool) -> None:
    call = parse(tools=[TOOL], tool_choice=wire)
    assert (call.tool_choice, call.one_tool_call) == (choice, one)


def test_the_format_of_the_output() -> None:
    assert parse(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).schema == SCHEMA
    assert parse(output_config={"format": None, "effort": None}).schema is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"max_tokens": 0}, "max_tokens", "between 1 and"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": {}}, "messages", "must be a list"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object, got text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user, assistant or system"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0]", "'image'"),
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0]", "'document'"),
        ({"messages": [user(text(cast("Any", 1)))]}, "messages[0].content[0].text", "must be text, got a number"),
        ({"messages": [user(text("\ud800"))]}, "messages[0].content[0].text", "lone surrogate"),
        ({"messages": [user(result(""))]}, "messages[0].content[0].tool_use_id", "must not be empty"),
        ({"messages": [user(result(content=[{"type": "image"}]))]}, "messages[0].content[0].content[0]", "'image'"),
        ({"messages": [assistant(text("a"))]}, "messages[0]", "prefill"),
        ({"messages": [assistant(USE, text("a"), USE)]}, "messages[0].content[2].id", "twice"),
        ({"messages": [assistant({**USE, "input": "{}"})]}, "messages[0].content[0].input", "must be an object"),
        ({"system": [{"type": "image"}]}, "system[0]", "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0]", "'web_search_20250305'"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples", "not supported"),
        ({"tools": [TOOL, TOOL]}, "tools", "unique"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "`tools` is empty"),
        ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, "tool_choice", "'sub'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "auto, any, tool or none"),
        ({"thread": {"type": "resume"}}, "thread.type", "'resume'"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id", "must be text"),
        ({"output_config": {"effort": "high"}}, "output_config.effort", "not supported"),
        ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management", "not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        ({"frequency_penalty": 1}, "frequency_penalty", "unknown field"),
        ({"stop_sequences": [""]}, "stop_sequences", "non-empty"),
    ],
)
def test_refusals_name_the_place(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_images_and_server_tools_are_unsupported_and_a_bad_schema_is_a_bad_schema() -> None:
    with pytest.raises(UnsupportedField):
        parse(messages=[user({"type": "image"})])
    with pytest.raises(InvalidToolSchema) as caught:
        parse(tools=[{"name": "add", "input_schema": {"type": 7}}])
    assert caught.value.param == "tools[0].input_schema"


def test_a_tool_needs_its_schema() -> None:
    with pytest.raises(InvalidToolSchema) as caught:
        parse(tools=[{"name": "add"}])
    assert caught.value.param == "tools[0].input_schema"


def test_fields_without_effect_and_empty_ones_pass() -> None:
    parse(**{name: {"a": 1} for name in NO_EFFECT})
    parse(**{name: values[-1] for name, values in REFUSED_UNLESS.items()})


def test_counting_needs_no_max_tokens() -> None:
    wanted = body()
    del wanted["max_tokens"]
    call = MESSAGES.parse_count(wanted)
    assert call.max_tokens is None
    assert json.loads(MESSAGES.count(prepare(call))) == {"input_tokens": 5}


# --- answers ------------------------------------------------------------------------------------------


def prepare(call: ModelCall | None = None) -> Prepared:
    """A call whose prompt has five tokens."""
    plan = SimpleNamespace(prompt_ids=np.arange(5))
    return Prepared(
        call or parse(),
        host=cast("Any", None),
        version=0,
        plan=cast("Any", plan),
        sampling=SamplingParams(max_tokens=50),
        enforced={},
        turn_ids=("msg_ep-1-0",),
    )


def choice(reply: Message, *, finish: FinishReason = FinishReason.STOP, stop_text: str = "") -> Choice:
    return Choice(
        index=0,
        turn_id="msg_ep-1-0",
        reply=reply,
        finish_reason=finish,
        stop_text=stop_text,
        token_ids=[7, 8, 9],
        logprobs=[-0.5] * 3,
        num_prompt_tokens=5,
    )


REPLIES = {
    "text": Message("assistant", "Hello é"),
    "call": Message("assistant", tool_calls=(CALL,)),
    "all": Message("assistant", "Let me add.", reasoning="Hm é.", tool_calls=(CALL, replace(CALL, id="call_2"))),
    "thinking": Message("assistant", reasoning="Hm."),
    "empty": Message("assistant"),
}


def whole(given: Choice, prepared: Prepared | None = None) -> AnthropicMessage:
    raw = json.loads(MESSAGES.answer(prepared or prepare(), [given]))
    return AnthropicMessage.model_validate(raw, strict=True)


def stream(given: Choice, *, deltas: list[tuple[str, str]] | None = None) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of every frame."""
    writer = MESSAGES.events(prepare())
    reply = given.reply
    if deltas is None:
        deltas = [("reasoning", c) for c in reply.reasoning] + [("content", c) for c in reply.content]
    frames = writer.begin(given.turn_id)
    frames += b"".join(writer.delta(TextDelta(0, given.turn_id, t, cast("Any", kind))) for kind, t in deltas)
    return frames_of(frames + writer.choice(given) + writer.end([given]))


def frames_of(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    assert data.endswith(b"\n\n")
    found = []
    for frame in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = frame.split("\n")
        found.append((name.removeprefix("event: "), json.loads(line.removeprefix("data: "))))
    return found


def accumulated(events: list[tuple[str, dict[str, Any]]]) -> AnthropicMessage:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for name, data in events:
        assert data["type"] == name
        if name != "ping":
            event = EVENT.validate_python(data, strict=True)
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return AnthropicMessage.model_validate(snapshot.to_dict())


@pytest.mark.parametrize("name", REPLIES)
def test_an_answer_sent_back_is_the_reply_that_was_committed(name: str) -> None:
    """Whole and streamed, as the SDK's own helper turns it into a parameter."""
    for message in (whole(choice(REPLIES[name])), accumulated(stream(choice(REPLIES[name])))):
        sent_back = orjson.loads(json.dumps(message.to_dict()))
        again = told({"role": "assistant", "content": sent_back["content"]}, user(text("go on")))[0]
        assert again == REPLIES[name]


@pytest.mark.parametrize("name", REPLIES)
def test_streaming_tells_the_same_as_not_streaming(name: str) -> None:
    given = choice(REPLIES[name])
    streamed, at_once = accumulated(stream(given)), whole(given)
    assert streamed.model_dump(exclude_none=True) == at_once.model_dump(exclude_none=True)


def test_the_order_of_events() -> None:
    events = stream(
        choice(REPLIES["all"]), deltas=[("reasoning", "Hm é."), ("content", "Let me "), ("content", "add.")]
    )
    names = [name for name, _ in events]
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    call = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", "ping", *block, *block, *call, *call, "message_delta", "message_stop"]
    starts = [data for name, data in events if name == "content_block_start"]
    assert [s["index"] for s in starts] == [0, 1, 2, 3]
    assert [s["content_block"]["type"] for s in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert events[0][1]["message"]["usage"]["input_tokens"] == 5
    assert events[-2][1]["usage"]["output_tokens"] == 3


def test_a_large_number_survives() -> None:
    large = ToolCall.of("call_1", name="add", arguments='{"a": 12345678901234567890123}')
    data = MESSAGES.answer(prepare(), [choice(Message("assistant", tool_calls=(large,)))])
    assert b'"input":{"a": 12345678901234567890123}' in data


@pytest.mark.parametrize(
    ("reply", "finish", "stop_text", "reason", "sequence"),
    [
        ("text", FinishReason.STOP, "", "end_turn", None),
        ("text", FinishReason.LENGTH, "", "max_tokens", None),
        ("text", FinishReason.STOP, "END", "stop_sequence", "END"),
        ("call", FinishReason.STOP, "", "tool_use", None),
        ("call", FinishReason.LENGTH, "", "max_tokens", None),
    ],
)
def test_why_a_turn_ended(reply: str, finish: FinishReason, stop_text: str, reason: str, sequence: str | None) -> None:
    given = choice(REPLIES[reply], finish=finish, stop_text=stop_text)
    for message in (whole(given), accumulated(stream(given))):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 3)
        assert (message.id, message.model, message.role) == ("msg_ep-1-0", "solver", "assistant")


def test_the_model_is_echoed_with_its_agent() -> None:
    assert whole(choice(REPLIES["text"]), prepare(parse(model="solver:judge"))).model == "solver:judge"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextOverflow("too long"), "invalid_request_error"),
        (UnknownPolicy("none"), "not_found_error"),
        (OverloadedError("full"), "rate_limit_error"),
        (NoEngine("none"), "overloaded_error"),
        (WingbeatError("broken"), "api_error"),
    ],
)
def test_errors_in_anthropics_shape(error: WingbeatError, kind: str) -> None:
    raw = json.loads(MESSAGES.error(error))
    assert ErrorResponse.model_validate(raw).error.type == kind
    assert (raw["error"]["message"], raw["error"]["code"]) == (error.message, error.code)
    ((name, data),) = frames_of(MESSAGES.events(prepare()).error(error))
    assert (name, data) == ("error", raw)


def test_a_lost_thread_has_the_code_on_which_the_sdk_replays() -> None:
    error = json.loads(MESSAGES.error(NotFoundError("no such message", param="previous_turn_id")))["error"]
    assert error["details"] == {"error_code": "thread_not_found"}
    assert error["param"] == "thread.previous_message_id"
