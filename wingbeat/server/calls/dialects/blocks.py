"""What the dialects of typed blocks and named events share: text out of JSON, server-sent events.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from wingbeat.core.errors import RequestError, UnsupportedField
from wingbeat.tracking.messages import kind_of, lone_surrogate


def event(kind: str, data: Mapping[str, Any]) -> bytes:
    """One named server-sent event; its JSON repeats the name as ``type``."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))


def as_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"`{where}` must be an object, got {kind_of(value)}", param=where)
    return value


def as_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"`{where}` must be a list, got {kind_of(value)}", param=where)
    return value


def as_text(value: object, where: str, *, empty: bool = True) -> str:
    """Text that has bytes: JSON can spell lone surrogates, which have none."""
    if not isinstance(value, str):
        raise RequestError(f"`{where}` must be text, got {kind_of(value)}", param=where)
    if not value and not empty:
        raise RequestError(f"`{where}` must not be empty", param=where)
    place = lone_surrogate(value)
    if place is not None:
        raise RequestError(f"`{where}` contains a lone surrogate at character {place}: send valid Unicode", param=where)
    return value


def joined_text(value: object, where: str, *, types: Collection[str]) -> str:
    """Text, or the texts of a list of parts; a part of another type is refused by name."""
    if not isinstance(value, list):
        return as_text(value, where)
    texts: list[str] = []
    for index, item in enumerate(value):
        place = f"{where}[{index}]"
        part = as_object(item, place)
        if not _is_one_of(part.get("type"), types):
            raise unsupported(part.get("type"), place, known=types)
        texts.append(as_text(part.get("text"), f"{place}.text"))
    return "".join(texts)


def _is_one_of(kind: object, types: Collection[str]) -> bool:
    return isinstance(kind, str) and kind in types


def check_new_id(call_id: str, calls: Sequence[Mapping[str, Any]], where: str) -> None:
    """Ids of the calls of one reply are unique: results name them."""
    if any(call["id"] == call_id for call in calls):
        raise RequestError(f"`{where}` {shown(call_id)} occurs twice in one reply: ids must be unique", param=where)


def unsupported(kind: object, where: str, *, known: Collection[str]) -> UnsupportedField:
    """The refusal of something that a text model with function tools cannot be shown."""
    return UnsupportedField(
        f"`{where}` has type {shown(kind)}: supported is only {', '.join(sorted(known))}", param=where
    )


def shown(value: object) -> str:
    """A value in a message: short, and never the whole of something nested, which may be too deep to print."""
    return f"{value!r:.60}" if isinstance(value, str | int | float | bool | None) else kind_of(value)
