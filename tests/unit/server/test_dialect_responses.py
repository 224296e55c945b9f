"""OpenAI's responses: what is parsed, and answers as the official SDK's own models and accumulator read them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from wingbeat.core.errors import (
    InvalidToolSchema,
    NoEngine,
    NotFoundError,
    RequestError,
    UnsupportedField,
    WingbeatError,
)
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.server.calls.dialects.responses import RESPONSES
from wingbeat.server.calls.dialects.responses.items import decrypt_reasoning, encrypt_reasoning
from wingbeat.server.calls.dialects.responses.parse import NO_EFFECT, REFUSED_UNLESS
from wingbeat.server.calls.model_call import ChatPrompt, Choice, ModelCall, Prepared, TextDelta, ToolChoice
from wingbeat.tracking.messages import Message, ToolCall, parse_messages

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
CALL = ToolCall.of("call_1", name="add", arguments='{"b":3,  "a": 2, "note":"é"}')


def parse(**fields: Any) -> ModelCall:
    return RESPONSES.parse({"model": "solver", "input": "hi", **fields})


def told(*items: Any) -> tuple[Message, ...]:
    """The conversation of these input items."""
    prompt = parse(input=list(items)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def message(role: str, text: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


def function_call(call_id: str = "call_1", arguments: str = '{"a": 2, "b": 3, "note": "é"}') -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": "add", "arguments": arguments}


def result(call_id: str = "call_1", output: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def reasoning(text: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        **more,
    }


# --- requests -----------------------------------------------------------------------------------------


def test_a_whole_request() -> None:
    call = parse(
        model="solver:judge",
        instructions="Be brief.",
        tools=[TOOL],
        temperature=0.5,
        top_p=0.9,
        stream=True,
        max_output_tokens=7,
        parallel_tool_calls=False,
        include=["message.output_text.logprobs"],
        reasoning={"effort": None, "summary": "auto"},
        truncation="disabled",
        store=False,
    )
    assert (call.policy, call.agent, call.max_tokens) == ("solver", "judge", 7)
    assert (call.temperature, call.top_p, call.stream, call.logprobs) == (0.5, 0.9, True, True)
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
    assert call.tools == [{"type": "function", "function": function}]
    assert call.prompt == ChatPrompt((Message("user", "hi"),), instructions="Be brief.")
    assert (call.tool_choice, call.one_tool_call, call.schema) == (ToolChoice(), True, None)


def test_a_history_equals_that_of_the_chat_dialect() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"b":3,"a":2.0,"note":"é"}'}}
    chat = parse_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": "Let me add.", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "5"},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "Thanks"},
        ]
    )
    ours = told(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?", "type": "message"},
        reasoning("Hm."),
        message("assistant", "Let me add.", id="msg_1", status="completed"),
        function_call(),
        result(output=[{"type": "input_text", "text": "5"}]),
        {"role": "assistant", "content": "5"},
        message("user", "Thanks"),
    )
    assert ours == chat


def test_items_of_the_assistant_that_stand_together_are_one_reply() -> None:
    (reply, *answers) = told(
        function_call("a"), function_call("b"), message("assistant", "late"), result("b"), result("a")
    )
    assert (reply.content, [call.id for call in reply.tool_calls]) == ("late", ["a", "b"])
    assert [answer.tool_call_id for answer in answers] == ["b", "a"]


def test_what_cannot_belong_to_the_same_reply_begins_the_next() -> None:
    first, second, third = told(message("assistant", "one"), message("assistant", "two"), reasoning("Hm."))
    assert (first, second) == (Message("assistant", "one"), Message("assistant", "two"))
    assert third == Message("assistant", reasoning="Hm.")


@pytest.mark.parametrize(
    "item",
    [
        reasoning("Hm."),
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encrypt_reasoning("Hm.")},
        reasoning("edited", encrypted_content=encrypt_reasoning("Hm.")),
        reasoning("Hm.", encrypted_content="of another server"),
        {"role": "assistant", "content": "<think>\nHm.\n</think>"},
    ],
)
def test_reasoning_comes_back_in_many_ways(item: dict[str, Any]) -> None:
    wanted = Message("assistant", "Well.", reasoning="Hm.")
    assert told(item, message("assistant", "Well."), message("user", "a"))[0] == wanted


def test_thoughts_and_text_in_one_message() -> None:
    assert told(message("assistant", "<think>\nHm.\n</think>\n\nWell."))[0] == Message("assistant", "Well.", "Hm.")
    assert told(message("assistant", "Not <think>x</think>"))[0].content == "Not <think>x</think>"


def test_encrypted_reasoning_of_others_is_none_of_ours() -> None:
    assert decrypt_reasoning(encrypt_reasoning("Hm é")) == "Hm é"
    for foreign in (
        None,
        7,
        "gAAAA",
        encrypt_reasoning("")[:-3] + "!",
        encrypt_reasoning("x") + "=",
        "wingbeat-reasoning-1:/w==",
    ):
        assert decrypt_reasoning(foreign) in (None, "")


def test_the_previous_response() -> None:
    call = parse(previous_response_id="resp_7", input=[result()], instructions="Be brief.")
    assert call.prompt == ChatPrompt((Message("tool", "5", tool_call_id="call_1"),), "resp_7", instructions="Be brief.")


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "add"}, ToolChoice("required", ("add",))),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            ToolChoice("required", ("add",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, ToolChoice()),
    ],
)
def test_tool_choices(wire: Any, choice: ToolChoice) -> None:
    assert parse(tools=[TOOL], tool_choice=wire).tool_choice == choice


@pytest.mark.parametrize(
    ("wire", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, SCHEMA),
    ],
)
def test_formats(wire: dict[str, Any], schema: Any) -> None:
    assert parse(text={"format": wire, "verbosity": "low"}).schema == schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": None}, "input", "must be a list"),
        ({"input": ["hi"]}, "input[0]", "must be an object"),
        ({"input": "\ud800"}, "input", "lone surrogate"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "'item_reference'"),
        ({"input": [{"id": "msg_1"}]}, "input[0]", "'item_reference'"),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input[0]", "'web_search_call'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "user, assistant"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "'input_image'",
        ),
        ({"input": [function_call(), function_call()]}, "input[1].call_id", "twice"),
        ({"input": [{**result(), "call_id": None}]}, "input[0].call_id", "must be text"),
        ({"input": [{**function_call(), "arguments": {}}]}, "input[0].arguments", "must be text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]", "'custom'"),
        ({"tools": [{**TOOL, "async": True}]}, "tools[0].async", "not supported"),
        ({"tools": [TOOL, TOOL]}, "tools", "unique"),
        ({"tool_choice": "required"}, "tool_choice", "`tools` is empty"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
        ({"tool_choice": "maybe"}, "tool_choice", "'maybe'"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]},
            "tool_choice",
            "mode",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar'"),
        ({"text": {"stop": ["x"]}}, "text.stop", "unknown field"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "not supported"),
        ({"include": ["everything"]}, "include", "'everything'"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "between 1"),
        ({"messages": []}, "messages", "unknown field"),
    ],
)
def test_refusals_name_the_place(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_images_are_unsupported_and_a_bad_schema_is_a_bad_schema() -> None:
    with pytest.raises(UnsupportedField):
        parse(input=[{"role": "user", "content": [{"type": "input_file"}]}])
    with pytest.raises(InvalidToolSchema) as caught:
        parse(tools=[{**TOOL, "parameters": {"type": 7}}])
    assert caught.value.param == "tools[0].parameters"


def test_fields_without_effect_and_empty_ones_pass() -> None:
    parse(**{name: {"a": 1} for name in NO_EFFECT})
    parse(**{name: values[-1] for name, values in REFUSED_UNLESS.items()}, background=False, include=[], top_logprobs=0)


# --- answers ------------------------------------------------------------------------------------------

TEMPLATE = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")


def prepare(call: ModelCall | None = None) -> Prepared:
    """A call whose prompt has five tokens."""
    return Prepared(
        call or parse(),
        host=cast("Any", SimpleNamespace(template=TEMPLATE)),
        version=0,
        plan=cast("Any", SimpleNamespace(prompt_ids=np.arange(5))),
        sampling=SamplingParams(max_tokens=50, temperature=0.7),
        enforced={},
        turn_ids=("resp_ep-1-0",),
    )


def choice(reply: Message, *, finish: FinishReason = FinishReason.STOP) -> Choice:
    return Choice(
        index=0,
        turn_id="resp_ep-1-0",
        reply=reply,
        finish_reason=finish,
        stop_text="",
        token_ids=[7, 8, 9],
        logprobs=[-0.5, -1.5, -0.25],
        num_prompt_tokens=5,
    )


REPLIES = {
    "text": Message("assistant", "Hello é"),
    "call": Message("assistant", tool_calls=(CALL,)),
    "all": Message("assistant", "Let me add.", reasoning="Hm é.", tool_calls=(CALL, replace(CALL, id="call_2"))),
    "thinking": Message("assistant", reasoning="Hm."),
    "empty": Message("assistant"),
}


def whole(given: Choice, prepared: Prepared | None = None) -> Response:
    return Response.model_validate(json.loads(RESPONSES.answer(prepared or prepare(), [given])))


def stream(
    given: Choice, *, prepared: Prepared | None = None, deltas: list[tuple[str, str]] | None = None
) -> list[dict[str, Any]]:
    """The data of every event."""
    writer = RESPONSES.events(prepared or prepare())
    reply = given.reply
    if deltas is None:
        deltas = [("reasoning", c) for c in reply.reasoning] + [("content", c) for c in reply.content]
    frames = writer.begin(given.turn_id)
    frames += b"".join(writer.delta(TextDelta(0, given.turn_id, t, cast("Any", kind))) for kind, t in deltas)
    return frames_of(frames + writer.choice(given) + writer.end([given]))


def frames_of(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n\n")
    found = []
    for frame in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = frame.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def accumulated(events: list[dict[str, Any]]) -> Response:
    """The last event's response, after the SDK's accumulator agreed with every event on the way."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for number, data in enumerate(events):
        assert data["sequence_number"] == number
        state.handle_event(EVENT.validate_python(data))
    return Response.model_validate(events[-1]["response"])


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("encrypted", [False, True])
def test_an_answer_sent_back_is_the_reply_that_was_committed(name: str, encrypted: bool) -> None:
    prepared = prepare(parse(include=["reasoning.encrypted_content"] if encrypted else []))
    given = choice(REPLIES[name])
    for response in (whole(given, prepared), accumulated(stream(given, prepared=prepared))):
        items = [item.model_dump(exclude_none=True) for item in response.output]
        if encrypted:
            items = [item | {"content": []} if item["type"] == "reasoning" else item for item in items]
        assert told(*items, message("user", "go on"))[0] == REPLIES[name]


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_streaming_tells_the_same_as_not_streaming(name: str, finish: FinishReason) -> None:
    given = choice(REPLIES[name], finish=finish)
    prepared = prepare(parse(include=["message.output_text.logprobs"]))
    events = stream(given, prepared=prepared)
    at_once = whole(given, prepared).model_dump(exclude={"created_at", "completed_at"})
    assert accumulated(events).model_dump(exclude={"created_at", "completed_at"}) == at_once
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_the_order_of_events() -> None:
    events = stream(
        choice(REPLIES["all"]), deltas=[("reasoning", "Hm é."), ("content", "Let me "), ("content", "add.")]
    )
    names = [event["type"].removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert names == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert {event["item"]["status"] for event in added} == {"in_progress"}


def test_ids_are_unique_and_come_from_the_turn() -> None:
    response = whole(choice(REPLIES["all"]))
    assert response.id == "resp_ep-1-0"
    assert [item.id for item in response.output] == ["rs_ep-1-0", "msg_ep-1-0", "fc_1", "fc_2"]


@pytest.mark.parametrize("name", ["text", "call"])
def test_a_reply_that_the_limit_cut_is_incomplete(name: str) -> None:
    given = choice(REPLIES[name], finish=FinishReason.LENGTH)
    for response in (whole(given), accumulated(stream(given))):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
    assert stream(given)[-1]["type"] == "response.incomplete"
    assert whole(choice(REPLIES[name])).incomplete_details is None


def test_the_request_is_echoed_and_the_sampling_is_told_truthfully() -> None:
    call = parse(
        model="solver:judge",
        instructions="Be brief.",
        metadata={"k": "v"},
        tools=[TOOL],
        temperature=0.0,
        previous_response_id="resp_1",
        max_output_tokens=9,
    )
    response = whole(choice(REPLIES["text"]), prepare(call))
    assert (response.model, response.instructions, response.metadata) == ("solver:judge", "Be brief.", {"k": "v"})
    assert (response.previous_response_id, response.max_output_tokens) == ("resp_1", 9)
    assert (response.temperature, response.top_p, response.parallel_tool_calls) == (0.7, 1.0, True)
    assert [tool.name for tool in cast("Any", response.tools)] == ["add"]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 3, 8)


def test_logprobs_only_for_those_who_ask() -> None:
    asked = prepare(parse(include=["message.output_text.logprobs"]))
    given = choice(REPLIES["text"])
    given.logprobs[1] = float("nan")  # the engine gave none
    (item,) = json.loads(RESPONSES.answer(asked, [given]))["output"]
    told_of = item["content"][0]["logprobs"]
    assert [(entry["token"], entry["logprob"]) for entry in told_of] == [("<7>", -0.5), ("<8>", None), ("<9>", -0.25)]
    (item,) = json.loads(RESPONSES.answer(prepare(), [choice(REPLIES["text"])]))["output"]
    assert item["content"][0]["logprobs"] == []


def test_errors() -> None:
    raw = json.loads(RESPONSES.error(RequestError("bad", param="input")))
    assert raw == {
        "error": {"message": "bad", "type": "invalid_request_error", "code": "invalid_request", "param": "input"}
    }
    lost = json.loads(RESPONSES.error(NotFoundError("gone", param="previous_turn_id")))["error"]
    assert (lost["code"], lost["param"]) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("error", [NoEngine("none"), WingbeatError("broken")])
def test_an_error_in_the_stream_is_typed_and_raises_in_the_sdk(error: WingbeatError) -> None:
    writer = RESPONSES.events(prepare())
    begun = frames_of(writer.begin("resp_ep-1-0"))
    (event,) = frames_of(writer.error(error))
    assert EVENT.validate_python(event).message == error.message
    assert event["sequence_number"] == len(begun)
    assert event["error"]["code"] == error.code
