"""Client messages become canonical values: what clients re-spell is equal, what they rewrite is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import RequestError, UnsupportedField
from wingbeat.tracking import Message, ToolCall, parse_message, parse_messages


def call(**function: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", **function}}


def assistant(**fields: Any) -> Message:
    return parse_message({"role": "assistant", **fields})


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}, {"content": []}], ids=repr)
def test_no_content_has_one_spelling(content: dict[str, Any]) -> None:
    assert assistant(**content) == Message("assistant")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    assert parse_message({"role": "user", "content": parts}) == Message("user", "ab")


@pytest.mark.parametrize(
    "text", ['{"b": 3,  "a": 2}', '{"a":2,"b":3}', '{"a": 2.0, "b": 3}', '{"a": 2, "b": 3e0}', ' {"a":2,"b":3}\n']
)
def test_arguments_are_compared_as_json(text: str) -> None:
    assert assistant(tool_calls=[call(arguments=text)]) == assistant(tool_calls=[call(arguments='{"b":3,"a":2}')])


@pytest.mark.parametrize("text", ['{"a":"2","b":3}', '{"a":2}', '{"a":2,"b":true}', '{"a":2,"b":[3]}', '{"a":2,"b":3'])
def test_other_arguments_are_unequal(text: str) -> None:
    assert assistant(tool_calls=[call(arguments=text)]) != assistant(tool_calls=[call(arguments='{"b":3,"a":2}')])


def test_escapes_of_arguments_do_not_matter() -> None:
    assert assistant(tool_calls=[call(arguments='{"a":"\\u00e9"}')]) == assistant(
        tool_calls=[call(arguments='{"a":"é"}')]
    )


@pytest.mark.parametrize("arguments", [None, "", "  ", "{}", {}])
def test_no_arguments_have_one_spelling(arguments: object) -> None:
    assert assistant(tool_calls=[call(arguments=arguments)]).tool_calls[0].arguments == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [("9007199254740993", "9007199254740992.0"), ("123456789012345678901", "1.2345678901234568e20"), ("-1", "-1.0")],
)
def test_numbers_beyond_a_float_are_compared_as_floats(one: str, other: str) -> None:
    """What a client in JavaScript makes of a long integer."""
    assert assistant(tool_calls=[call(arguments=f'{{"a":{one}}}')]) == assistant(
        tool_calls=[call(arguments=f'{{"a":{other}}}')]
    )


@pytest.mark.parametrize("number", ["1e400", "1" * 400, "1" * 5000])
def test_numbers_beyond_all_floats_stay_what_they_are(number: str) -> None:
    message = assistant(tool_calls=[call(arguments=f'{{"a":{number}}}')])
    assert message == assistant(tool_calls=[call(arguments=f'{{"a":{number}}}')])
    assert message != assistant(tool_calls=[call(arguments='{"a":1}')])


def test_arguments_that_are_no_json_stay_text() -> None:
    for text in ('{"a": ', "[" * 100_000, '{"a": NaN}', '{"a": "\\ud800"}'):
        parsed = assistant(tool_calls=[call(arguments=text)]).tool_calls[0]
        assert parsed.arguments == text
        assert parsed == ToolCall.of("c1", name="add", arguments=text)


def test_a_true_argument_is_no_one() -> None:
    assert ToolCall.of("c", name="f", arguments='{"a":true}') != ToolCall.of("c", name="f", arguments='{"a":1}')


def test_decorations_of_clients_are_ignored() -> None:
    plain = assistant(content="x", tool_calls=[call(arguments="{}")])
    decorated = assistant(
        content="x",
        tool_calls=[{**call(arguments="{}", parsed_arguments={}), "index": 0}],
        refusal=None,
        audio=None,
        annotations=[],
        function_call=None,
        parsed={"x": 1},
        provider_specific_fields={"a": 1},
    )
    assert plain == decorated
    assert hash(plain) == hash(decorated)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_several_names(key: str) -> None:
    message = assistant(content="a", **{key: "because"})
    assert message == Message("assistant", "a", reasoning="because")
    assert message.to_template_dict()["reasoning_content"] == "because"


def test_developer_is_system() -> None:
    assert parse_message({"role": "developer", "content": "x"}) == Message("system", "x")


def test_the_template_sees_plain_data() -> None:
    message = assistant(content=None, tool_calls=[call(arguments='{"a": 1}')])
    assert message.to_template_dict() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    result = parse_message({"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"})
    assert result.to_template_dict() == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}


USER = {"role": "user", "content": "x"}
BAD = [
    ("hello", "messages"),
    (None, "messages"),
    ([], "messages"),
    (["hello"], "messages[0]"),
    ([USER, {"content": "x"}], "messages[1].role"),
    ([{"role": "function", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([USER, USER, USER, {"role": "user", "content": 3}], "messages[3].content"),
    ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ([{"role": "user", "content": "x", "name": 7}], "messages[0].name"),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "x", "tool_call_id": "c"}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "x", "tool_calls": [call()]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls[0].id"),
    ([{"role": "assistant", "tool_calls": [call(name="")]}], "messages[0].tool_calls[0].function.name"),
    ([{"role": "assistant", "tool_calls": [call(arguments=3)]}], "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "assistant", "tool_calls": [call(), call()]}], "messages[0].tool_calls[1].id"),
    ([{"role": "assistant", "reasoning": {"x": 1}}], "messages[0].reasoning"),
]


@pytest.mark.parametrize(("value", "param"), BAD, ids=[f"{n}-{param}" for n, (_, param) in enumerate(BAD)])
def test_errors_name_the_place(value: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(value)
    assert caught.value.param == param
    assert param in caught.value.message


REFUSED = [
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0]", "image_url"),
    ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "function_call", "function_call"),
    ({"role": "assistant", "content": "x", "prefix": True}, "prefix", "prefix"),
    ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}, "tool_calls[0].type", "custom"),
]


@pytest.mark.parametrize(("value", "place", "word"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(value: dict[str, Any], place: str, word: str) -> None:
    with pytest.raises(UnsupportedField, match=word) as caught:
        parse_messages([value])
    assert caught.value.param == f"messages[0].{place}"


DEEP: Any = "x"
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", [DEEP, "x" * 10_000_000], ids=["deep", "long"])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: [{"role": value, "content": "x"}],
        lambda value: [{"role": "user", "content": value, "name": value}],
        lambda value: [{"role": "user", "content": [{"type": value}]}],
        lambda value: [{"role": "assistant", "tool_calls": [call(), {**call(), "type": value}]}],
        lambda value: [{"role": "assistant", "tool_calls": [{**call(), "id": value}] * 2}],
        lambda value: [{"role": "assistant", "tool_calls": [call(arguments={"a": value})], "function_call": value}],
    ],
)
def test_errors_stay_short_whatever_was_sent(make: Callable[[Any], Any], value: Any) -> None:
    try:
        parse_messages(make(value))
    except RequestError as error:
        assert len(error.message) < 300


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(max_size=4), json_values, max_size=4), indent=st.sampled_from([None, 2]))
def test_any_respelling_of_json_is_equal(arguments: dict[str, Any], indent: int | None) -> None:
    spelled = json.dumps(arguments, indent=indent, sort_keys=True, ensure_ascii=indent is None)
    compact = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    assert ToolCall.of("c", name="f", arguments=spelled) == ToolCall.of("c", name="f", arguments=compact)
