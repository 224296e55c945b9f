"""The arguments of a call: what is taken, and what a model is told of what is not."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from wingbeat.tools import Tool, ToolOptions, ToolRefused, tool
from wingbeat.tools.arguments import ArgumentsRejected


class Unit(enum.Enum):
    METRES = "m"
    FEET = "ft"


class Place(BaseModel, extra="forbid"):
    name: Annotated[str, Field(min_length=1)]
    height: float | None = None


@tool
def survey(
    places: list[Place],
    unit: Unit,
    depth: Annotated[int, Field(ge=0, le=9)] = 3,
    mode: Literal["quick", "deep", 3] = "quick",
    tags: dict[str, bool] | None = None,
    origin: Place | int | None = None,
    free: Any = None,
) -> str:
    "Survey places."
    return ""


@tool
def add(a: int, b: float) -> float:
    "Add."
    return a + b


def told(arguments: Any, of: Tool = add) -> str:
    with pytest.raises(ArgumentsRejected) as caught:
        of.arguments.read(arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"a": 1}', "b: expected number, got nothing"),
        ('{"a": "1", "b": 2}', 'a: expected a valid integer, got "1"'),
        ('{"a": true, "b": 2}', "a: expected a valid integer, got true"),
        ('{"a": 1, "b": 2, "c": 3}', "c: expected only arguments of this tool (a, b), got this one"),
        ('{"a": 1, "b": NaN}', "b: expected a finite number, got NaN"),
        ("[1, 2]", "the arguments: expected a JSON object, got [1, 2]"),
        ('{"a": 1, "b": }', "the arguments are no JSON: expected value"),
        ("add 1 and 2", 'the arguments are no JSON: expected value at line 1 column 1; got "add 1 and 2"'),
    ],
)
def test_an_observation_names_the_field_what_was_expected_and_what_came(arguments: str, words: str) -> None:
    assert told(arguments).startswith(words)


def test_every_wrong_field_is_told_at_once_and_deep_ones_with_their_path() -> None:
    arguments = {"places": [{"name": "A"}, {"name": "", "size": 1}], "unit": "miles", "depth": 10}
    assert told(json.dumps(arguments), survey).splitlines() == [
        'places[1].name: String should have at least 1 character, got ""',
        "places[1].size: expected only known fields, got this one",
        "unit: expected 'm' or 'ft', got \"miles\"",
        "depth: expected less than or equal to 9, got 10",
    ]


def test_long_values_are_shown_short_and_many_faults_are_counted() -> None:
    words = told(json.dumps({"a": "x" * 10_000, "b": 1}))
    assert len(words) < 200 and "(10002 characters)" in words
    lines = told(json.dumps({f"wrong_{number}": 1 for number in range(50)} | {"a": 1, "b": 1})).splitlines()
    assert len(lines) == 9 and lines[-1] == "(and 42 more)"


def test_only_what_was_given_is_passed_on() -> None:
    assert survey.arguments.read('{"places": [], "unit": "m"}') == {"places": [], "unit": Unit.METRES}
    assert add.arguments.read({"a": 1, "b": 2}) == {"a": 1, "b": 2}


def test_no_arguments_at_all_are_an_empty_object() -> None:
    @tool
    def now() -> str:
        "Tell the time."
        return ""

    assert now.arguments.read("") == now.arguments.read("  ") == now.arguments.read("{}") == {}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-20, 20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PLACES = st.fixed_dictionaries(
    {"name": st.text(max_size=3) | JSON}, optional={"height": st.none() | st.floats(-9, 9) | JSON, "other": JSON}
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "places": st.lists(PLACES, max_size=2) | JSON,
        "unit": st.sampled_from(["m", "ft", "yd"]) | JSON,
        "depth": st.integers(-2, 12) | JSON,
        "mode": st.sampled_from(["quick", "deep", 3, "3"]) | JSON,
        "tags": st.none() | st.dictionaries(st.text(max_size=2), st.booleans(), max_size=2) | JSON,
        "origin": st.none() | PLACES | JSON,
        "free": JSON,
        "unknown": JSON,
    },
)


def has_whole_float(value: Any) -> bool:
    """1.0 is an integer to JSON schema, and none to Python: the one thing on which the two differ."""
    if isinstance(value, dict):
        return any(map(has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


@given(ARGUMENTS | JSON)
def test_what_the_schema_allows_is_taken_and_nothing_else(arguments: Any) -> None:
    if has_whole_float(arguments):
        return
    valid = Draft202012Validator(survey.arguments.schema).is_valid(arguments)
    try:
        survey.arguments.read(json.dumps(arguments))
    except ArgumentsRejected as error:
        assert not valid and str(error)
    else:
        assert valid


@tool
def echo(number: int, real: float, text: str, flags: list[bool | None]) -> None:
    "Echo."


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.lists(st.booleans() | st.none()))
def test_values_come_back_as_they_were(number: int, real: float, text: str, flags: list[bool | None]) -> None:
    given_ = {"number": number, "real": real, "text": text, "flags": flags}
    if abs(number) < 10**300:
        assert echo.arguments.read(json.dumps(given_)) == given_


@given(st.text() | st.text(alphabet='{}[]",:0123456789.eE+-truefalsn\\ '))
def test_garbage_is_refused_in_words(text: str) -> None:
    for each in (survey, raw):
        try:
            each.arguments.read(text)
        except ArgumentsRejected as error:
            assert str(error)
        else:
            assert json.loads(text.strip() or "{}") is not None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '"\ud800"', "\ud800", '{"a": 1' + "0" * 10_000 + "}"]
)
def test_absurd_texts_are_refused_in_words(text: str) -> None:
    assert told(text) and told(text, raw)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nothing"}, r"tool x: its JSON schema is none: \$\.type: 'nothing' is not valid"),
        ({"properties": {"a": {"$ref": "http://127.0.0.1:1/inner"}}}, "expected a .ref to a part of it, got 'http:"),
        ({"anyOf": [{"$ref": "file:///etc/passwd"}]}, "expected a .ref to a part of it, got 'file:"),
        ({"$ref": "#/$defs/none"}, "expected a .ref to a part of it"),
    ],
)
def test_a_schema_that_is_none_or_leads_elsewhere_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolRefused, match=words):
        Tool.of_schema(lambda: None, name="x", description="", parameters=schema)


def test_what_is_nested_beyond_reason_is_told() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    made = Tool.of_schema(lambda a: a, name="x", description="", parameters=schema)
    with pytest.raises(ArgumentsRejected, match=r"nested too deeply|no JSON"):
        made.arguments.read('{"a": ' * 900 + "{}" + "}" * 900)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"rows": ["a", "\\ud83d!"]}', "rows[1]: expected text, got half a surrogate pair in it"),
        (
            '{"\\udc00": 1}',
            'the arguments: expected names that are text, got half a surrogate pair in one, got {"?": 1}',
        ),
        ('{"rows": 1e999}', "rows: expected a finite number, got a larger one"),
    ],
)
def test_what_cannot_be_sent_on_is_refused(arguments: str, words: str) -> None:
    """One such call would end the connection to an MCP server, for all episodes."""
    of = Tool.of_schema(lambda: "", name="f", description="F.", parameters={"type": "object"})
    assert told(arguments, of) == words


def test_a_message_of_somebody_elses_is_short_too() -> None:
    schema = {"type": "object", "properties": {f"f{n}": {"type": "integer"} for n in range(20)}}
    of = Tool.of_schema(lambda: "", name="f", description="F.", parameters=schema)
    said = told(json.dumps({f"f{n}": "x" * 10_000 for n in range(20)}), of).splitlines()
    assert len(said) == 9 and said[-1] == "(and 12 more)"
    assert all(len(line) < 300 and line.endswith("is not of type 'integer'") for line in said[:-1])


def test_a_schema_may_refer_to_its_own_parts() -> None:
    parts = {"n": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": parts, "$id": "https://x/y.json"}
    made = Tool.of_schema(lambda a: a, name="x", description="", parameters=schema)
    assert made.arguments.read('{"a": 1}') == {"a": 1}
    with pytest.raises(ArgumentsRejected, match="a: 'b' is not of type"):
        made.arguments.read('{"a": "b"}')


raw = Tool.of_schema(
    lambda **values: values,
    name="raw",
    description="Somebody else's schema.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "rows": {"type": "array", "items": {"type": "string"}}},
        "required": ["a"],
        "additionalProperties": False,
    },
    options=ToolOptions(),
)


def test_arguments_of_a_given_schema_are_checked_by_it() -> None:
    assert raw.arguments.read('{"a": 1, "rows": ["x"]}') == {"a": 1, "rows": ["x"]}
    assert told('{"rows": ["x", 2]}', raw).splitlines() == [
        'the arguments: \'a\' is a required property, got {"rows": ["x", 2]}',
        "rows[1]: 2 is not of type 'string'",
    ]
    assert told("[]", raw) == "the arguments: expected a JSON object, got []"
