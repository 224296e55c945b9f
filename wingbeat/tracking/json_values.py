"""JSON objects that remember their text: templates print the same tools and arguments with every turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from wingbeat.tracking.messages import ToolCall

MAX_REMEMBERED = 4096
"""Arguments up to this many characters are worth remembering."""

_encoder = json.JSONEncoder(ensure_ascii=False)


class JsonObject(dict[str, Any]):
    """An object that nobody changes (templates run in an immutable sandbox)."""

    __slots__ = ("_texts",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._texts: dict[int | None, str] = {}

    def text(self, *, indent: int | None = None) -> str:
        """Its JSON, spelled as ``tojson`` of chat templates does."""
        found = self._texts.get(indent)
        if found is None:
            found = self._texts[indent] = json.dumps(self, ensure_ascii=False, indent=indent)
        return found


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """JSON as chat templates spell it."""
    if isinstance(value, JsonObject):
        return value.text(indent=indent)
    return _encoder.encode(value) if indent is None else json.dumps(value, ensure_ascii=False, indent=indent)


def remembering(value: Any) -> Any:
    """The same value, its objects at every depth replaced by remembering ones."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return JsonObject({key: remembering(item) for key, item in fields.items()})
    if isinstance(value, list):
        return [remembering(item) for item in cast("Sequence[Any]", value)]
    return value


def shared_arguments(call: ToolCall) -> Any:
    """The arguments of a call, for reading only."""
    text = call.arguments_text
    return _shared(text) if len(text) <= MAX_REMEMBERED else call.arguments


@lru_cache(maxsize=4096)
def _shared(text: str) -> Any:
    return remembering(ToolCall.of("", name="", arguments=text).arguments)
