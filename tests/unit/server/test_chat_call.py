"""One chat request: what is honoured, what has no effect, what is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import InvalidToolSchema, RequestError, UnsupportedField
from wingbeat.server.calls.dialects.chat import CHAT, HONOURED, NO_EFFECT, REFUSED_UNLESS
from wingbeat.server.calls.model_call import ChatPrompt, ModelCall, ToolChoice
from wingbeat.tracking.messages import Message

parse_chat = CHAT.parse

MESSAGES = [{"role": "user", "content": "hi"}]
FIELDS = sorted(HONOURED | NO_EFFECT | set(REFUSED_UNLESS) | {"made_up"})


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "solver", "messages": MESSAGES, **fields}


def test_the_smallest_request_has_the_documented_defaults() -> None:
    assert parse_chat(body()) == ModelCall(
        policy="solver",
        agent="",
        prompt=ChatPrompt((Message("user", "hi"),)),
        tools=None,
        tool_choice=ToolChoice("auto"),
        one_tool_call=False,
        schema=None,
        stream=False,
        include_usage=False,
        temperature=None,
        top_p=1.0,
        top_k=0,
        max_tokens=None,
        n=1,
        stop=(),
        seed=None,
        logprobs=False,
        return_token_ids=False,
    )


def test_every_honoured_field_arrives() -> None:
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
    call = parse_chat(
        body(
            model="solver:critic",
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
            top_p=0.5,
            top_k=20,
            max_tokens=9,
            max_completion_tokens=7,
            n=3,
            stop=["a", "b"],
            seed=-4,
            logprobs=True,
            return_token_ids=True,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        )
    )
    assert (call.policy, call.agent, call.tools) == ("solver", "critic", tools)
    assert (call.tool_choice, call.one_tool_call, call.schema) == (ToolChoice("required"), True, {"type": "object"})
    assert call.stream and call.include_usage and call.logprobs and call.return_token_ids
    assert (call.temperature, call.top_p, call.top_k, call.max_tokens, call.n) == (0.0, 0.5, 20, 7, 3)
    assert (call.stop, call.seed) == (("a", "b"), -4)


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_fields_without_effect_are_accepted_with_any_value(name: str) -> None:
    assert parse_chat(body(**{name: {"any": ["thing"]}})) == parse_chat(body())


@pytest.mark.parametrize("name", sorted(REFUSED_UNLESS))
def test_fields_that_would_change_sampling_are_refused_by_name_unless_they_say_nothing(name: str) -> None:
    for harmless in REFUSED_UNLESS[name]:
        assert parse_chat(body(**{name: harmless})) == parse_chat(body())
    with pytest.raises(UnsupportedField) as refusal:
        parse_chat(body(**{name: 7}))
    assert refusal.value.param == name and f"`{name}`" in refusal.value.message


BAD = {
    "model": ["", None, 3, "solver:\ud800"],
    "messages": [[], None, "hi", {}],
    "tools": ["x", [3], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}]],
    "tool_choice": [{"type": "function"}, "sometimes", 1, [], {"type": "allowed_tools"}],
    "parallel_tool_calls": [0, "no"],
    "stream": [1, "yes"],
    "stream_options": [[], "x", 0],
    "temperature": [-0.1, 10.5, "1", True, float("nan"), float("inf")],
    "top_p": [0, 1.1, False],
    "top_k": [-2, 1.5, True],
    "max_tokens": [0, -1, 1.5, True],
    "max_completion_tokens": [0, "9"],
    "n": [0, 65, 1.0],
    "stop": ["", [""], [1], ["x"] * 17, 5],
    "seed": [1.0, 2**63],
    "logprobs": ["true", 0],
    "top_logprobs": [1, "x"],
    "response_format": [{"type": "xml"}, "text", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}],
    "return_token_ids": [1, "yes"],
    "made_up": [1, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_every_error_names_the_field_at_fault(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        parse_chat(body(**{name: value}))
    assert (error.value.param or "").startswith(name)
    assert name in error.value.message


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_required_field_is_named(missing: str) -> None:
    with pytest.raises(RequestError, match=f"`{missing}`"):
        parse_chat({key: value for key, value in body().items() if key != missing})


@pytest.mark.parametrize("schema", [{"type": "objekt"}, {"properties": 3}, True, "x", [1]])
def test_a_tool_whose_parameters_are_no_object_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidToolSchema) as error:
        parse_chat(body(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    assert error.value.param == "tools[0].function.parameters"


def test_a_schema_nested_beyond_the_stack_is_refused_and_not_a_server_error() -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"not": schema}
    with pytest.raises(InvalidToolSchema, match="nested too deeply"):
        parse_chat(body(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]))


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "sub"}}, ToolChoice("required", ("sub",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[1], TOOLS[0]]}},
            ToolChoice("required", ("sub", "add")),
        ),
    ],
)
def test_every_form_of_tool_choice(value: Any, choice: ToolChoice) -> None:
    call = parse_chat(body(tools=TOOLS, tool_choice=value))
    assert (call.tool_choice, call.tools) == (choice, TOOLS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "`tools` is empty"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "mul"}}, "tools": TOOLS},
            "none of `tools`: add, sub",
        ),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}}, "send only"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "names must be unique"),
    ],
)
def test_a_choice_of_tools_that_are_not_there_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_chat(body(**fields))


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "array"}, "strict": True}}, {"type": "array"}),
    ],
)
def test_every_form_of_response_format(value: Any, schema: Any) -> None:
    assert parse_chat(body(response_format=value)).schema == schema


def test_the_messages_of_a_call_are_canonical() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert parse_chat(body(messages=[{"role": "user", "content": parts, "name": None}])) == parse_chat(body())
    with pytest.raises(UnsupportedField, match="image_url"):
        parse_chat(body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "required", "function", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "parameters", "properties", "x"]), inner)
    ),
    max_leaves=12,
)


@given(JSON | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6).map(lambda more: {**body(), **more}))
def test_any_json_gives_a_call_or_a_request_error(data: Any) -> None:
    try:
        call = parse_chat(json.loads(json.dumps(data)))
    except RequestError as error:
        assert error.message
    else:
        assert call.policy or call.agent or data["model"].startswith(":")
