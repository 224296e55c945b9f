"""A model's tool call, as OpenAI's SDK or plain JSON has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wingbeat.tools.arguments import shown


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model asked for."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    fault: str = ""
    """Why it cannot be answered; "": it can."""


def read_call(call: Any) -> ToolCall:
    """From an object of the SDK, or from a dictionary like it: a model may write anything, so this never raises."""
    call_id = str(_get(call, "id") or "")
    kind = _get(call, "type") or "function"
    if kind != "function":
        return ToolCall(call_id, "", "", f"expected a call of type function, got {shown(kind)}")
    function = _get(call, "function")
    name, arguments = _get(function, "name"), _get(function, "arguments")
    if not isinstance(name, str):
        return ToolCall(call_id, "", "", "expected the name of a function, got none")
    try:  # some servers send the object itself; None is that of a tool without arguments
        text = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        return ToolCall(call_id, name, "", f"expected the arguments as JSON text, got {shown(arguments)}")
    return ToolCall(call_id, name, text)


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
