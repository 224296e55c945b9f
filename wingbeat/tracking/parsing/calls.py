"""What the formats of tool calls have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from wingbeat.tracking.messages import ToolCall

NewId = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Extracted:
    """A reply without its reasoning."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0
    """Attempts at a call that could not be read; their text stays in the content."""


def read_call(value: object, *, new_id: NewId) -> ToolCall | None:
    """A call from ``{"name": text, "arguments" | "parameters": object}``; None where it is none."""
    if not isinstance(value, dict):
        return None
    data = cast(Mapping[str, Any], value)
    return make_call(data.get("name"), data.get("arguments", data.get("parameters")), new_id=new_id)


def make_call(name: object, arguments: object, *, new_id: NewId) -> ToolCall | None:
    """A call, or None where there is no name or the arguments are no object.

    Arguments may be spelled as a text that holds the object, as OpenAI's wire format does.
    """
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = msgspec.json.encode(arguments).decode()
    except (ValueError, RecursionError):
        return None
    return ToolCall.of(new_id(), name=name, arguments=text)


def parse_json(text: str) -> object:
    """The value, or None for anything that is no JSON (a null is no call either)."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
