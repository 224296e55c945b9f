"""What a model is told of a function, and which functions cannot be told."""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

import wingbeat
from wingbeat.client import Episode
from wingbeat.resources import LocalSpec
from wingbeat.tools import Tool, ToolRefused, tool
from wingbeat.tracking.grammar import grammar_fault

SPEC = LocalSpec(factory=list)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: float = 0.0


class Names(TypedDict):
    first: str
    last: NotRequired[str]


@dataclass
class Segment:
    start: Point
    end: Point


def parameters(of: Tool) -> dict[str, Any]:
    schema = of.schema
    assert schema["type"] == "function"
    return schema["function"]["parameters"]


def test_a_schema_has_types_descriptions_defaults_and_what_is_required() -> None:
    @tool
    def paint(
        colour: Colour,
        corners: list[Point],
        mode: Literal["fill", "line"] = "fill",
        width: Annotated[int, Field(ge=1, description="in pixels")] = 2,
        name: Optional[str] = None,  # noqa: UP045 (the old way to write it, too)
    ) -> str:
        """Paint a shape.

        It stays until it is painted over.

        Args:
            colour: of the paint
            corners: at least three,
                clockwise
            width: is told in the annotation

        Returns:
            Nothing a model needs to know.
        """
        return ""

    function = paint.schema["function"]
    assert function["name"] == "paint"
    assert function["description"] == "Paint a shape.\n\nIt stays until it is painted over."
    schema = function["parameters"]
    assert schema["required"] == ["colour", "corners"]
    assert schema["additionalProperties"] is False
    assert schema["properties"] == {
        "colour": {"$ref": "#/$defs/Colour", "description": "of the paint"},
        "corners": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "description": "at least three, clockwise"},
        "mode": {"type": "string", "enum": ["fill", "line"], "default": "fill"},
        "width": {"type": "integer", "minimum": 1, "default": 2, "description": "in pixels"},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    }
    assert schema["$defs"]["Colour"]["enum"] == ["red", "blue"]


def google(a: int, b: str = "") -> None:
    """Do it.

    Args:
        a: the first
        b (str, optional): the second
    """


def numpy(a: int, b: str = "") -> None:
    """Do it.

    Parameters
    ----------
    a : int
        the first
    b : str, optional
        the second
    """


def rest(a: int, b: str = "") -> None:
    """Do it.

    :param a: the first
    :param str b: the second
    :returns: nothing
    """


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_docstrings_of_three_styles_say_the_same(function: Any) -> None:
    made = tool(function)
    assert made.description == "Do it."
    described = {name: schema.get("description") for name, schema in parameters(made)["properties"].items()}
    assert described == {"a": "the first", "b": "the second"}


def test_arguments_may_have_names_that_mean_something_to_pydantic() -> None:
    @tool
    def f(schema: int, model_config: int, copy: int, _x: int, json: int = 0) -> dict[str, int]:
        "Take odd names."
        return {"schema": schema, "model_config": model_config, "copy": copy, "_x": _x, "json": json}

    assert list(parameters(f)["properties"]) == ["schema", "model_config", "copy", "_x", "json"]
    assert f.arguments.read('{"schema": 1, "model_config": 2, "copy": 3, "_x": 4}') == {
        "schema": 1,
        "model_config": 2,
        "copy": 3,
        "_x": 4,
    }


def test_the_name_and_the_description_can_be_given() -> None:
    @tool(name="say-it", description="Says it.")
    def f(text: str) -> str:
        return text

    assert (f.name, f.description) == ("say-it", "Says it.")
    assert f("still a function") == "still a function"


def test_a_tool_without_arguments_takes_an_empty_object() -> None:
    @tool
    def now() -> str:
        "Tell the time."
        return "noon"

    assert parameters(now) == {"type": "object", "properties": {}, "additionalProperties": False}


def test_resources_and_the_episode_are_no_arguments_of_the_model() -> None:
    @tool(resources={"box": SPEC})
    async def look(path: str, box: list[int], episode: Episode) -> str:
        """Look.

        Args:
            path: where
            box: not the model's business
        """
        return path

    assert list(parameters(look)["properties"]) == ["path"]
    assert look.needs_episode


def test_the_root_package_exports_it() -> None:
    assert wingbeat.tool is tool


@pytest.mark.parametrize(
    ("annotation", "given_", "read"),
    [
        (date, "2026-01-02", date(2026, 1, 2)),
        (timedelta, "PT90S", timedelta(seconds=90)),
        (Path, "a/b", Path("a/b")),
        (Decimal, "1.50", Decimal("1.50")),
        (set[int], [1, 2, 1], {1, 2}),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Names, {"first": "a"}, {"first": "a"}),
        (bytes, "ab", b"ab"),
        (list, [1, "a"], [1, "a"]),
    ],
)
def test_other_types_are_what_their_json_says(annotation: Any, given_: Any, read: Any) -> None:
    def f(it: Any) -> None:
        "F."

    f.__annotations__["it"] = annotation
    made = tool(f)
    assert made.arguments.read(json.dumps({"it": given_})) == {"it": read}
    assert parameters(made)["properties"]["it"].get("format") not in ("path", "binary")
    assert not grammar_fault(f"start: %json {json.dumps(parameters(made))}"), "a server can keep a model to it"


def refused(function: Any, **options: Any) -> str:
    with pytest.raises(ToolRefused) as caught:
        tool(**options)(function) if options else tool(function)
    return str(caught.value)


def test_a_parameter_without_annotation_is_refused() -> None:
    def f(text) -> None:  # type: ignore[no-untyped-def]
        "F."

    assert refused(f).endswith("parameter 'text' has no annotation: write its type, as in `text: str`")


def test_stars_and_positional_only_parameters_are_refused() -> None:
    def stars(*texts: str) -> None:
        "F."

    def double_stars(**texts: str) -> None:
        "F."

    def positional(text: str, /) -> None:
        "F."

    for function in (stars, double_stars, positional):
        assert "a model gives arguments by name" in refused(function)


def test_types_that_json_cannot_say_are_refused() -> None:
    def lock(it: threading.Lock) -> None:  # type: ignore[valid-type]
        "F."

    def generator(it: Iterator[threading.Event]) -> None:
        "F."

    def event(it: list[threading.Event]) -> None:
        "F."

    def unknown(it: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        "F."

    for function in (generator, event):
        assert "parameter 'it': JSON has no type" in refused(function)
    assert "parameter 'it'" in refused(lock)
    assert "cannot be resolved" in refused(unknown)


def test_defaults_must_fit_their_annotation() -> None:
    def f(count: int = None) -> None:  # type: ignore[assignment]  # noqa: RUF013
        "F."

    assert "its default None is no int" in refused(f)

    def lax(count: int = "3") -> None:  # type: ignore[assignment]
        "F."

    assert "its default '3' is no int" in refused(lax)

    def g(event: Any = threading.Event()) -> None:  # noqa: B008
        "G."

    assert "a default cannot be written as JSON" in refused(g)


def test_docstrings_are_held_to_the_signature() -> None:
    def undocumented(a: int) -> None: ...

    def misspelt(path: str) -> None:
        """F.

        Args:
            pth: where
        """

    assert "it has no docstring" in refused(undocumented)
    assert "its docstring describes 'pth', which is none of its parameters (path)" in refused(misspelt)


def test_what_is_no_function_is_refused() -> None:
    def numbers() -> Iterator[int]:
        "F."
        yield 1

    assert "it yields" in refused(numbers)
    assert "expected a function or a class" in refused(len)
    assert "its name" in refused(lambda: None, description="F.")
    assert "expected `self` as the first parameter" in refused(Static.f)


class Static:
    @staticmethod
    def f(a: int) -> None:
        "F."


def test_options_out_of_range_are_refused() -> None:
    def f() -> None:
        "F."

    assert "timeout_s" in refused(f, timeout_s=0)
    assert "retries" in refused(f, retries=-1)
    assert "max_output_chars" in refused(f, max_output_chars=10)
    assert "expected a parameter for each of its resources, got none for box" in refused(f, resources={"box": SPEC})
    assert "expected a Spec for 'box'" in refused(f, resources={"box": "sandbox"})


def test_a_class_is_refused_for_what_its_init_would_lack() -> None:
    class NoTools:
        pass

    class Needy:
        def __init__(self, box: list[int]) -> None: ...

        @tool
        def f(self) -> None:
            "F."

    assert "it has no tools" in refused(NoTools)
    assert "nothing is there for parameter 'box' of __init__" in refused(Needy)
    assert "a class takes only resources" in refused(Needy, name="x")


def test_nested_dataclasses_are_arguments_too() -> None:
    @tool
    def length(of: Segment) -> float:
        "Measure."
        return of.end.x - of.start.x

    read = length.arguments.read('{"of": {"start": {"x": 1}, "end": {"x": 4, "y": 2.5}}}')
    assert read == {"of": Segment(Point(x=1), Point(x=4, y=2.5))}
    assert length(**read) == 3


@given(st.text(max_size=200))
def test_no_docstring_breaks_the_decorator(text: str) -> None:
    def f(a: int = 0) -> None: ...

    f.__doc__ = text
    try:
        assert tool(f).schema["function"]["description"]
    except ToolRefused as error:
        assert "docstring" in str(error)
