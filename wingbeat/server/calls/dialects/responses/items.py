"""Input items as canonical messages, equal to those of every other dialect.

One reply is several items on the wire (reasoning, a message, function calls), so the assistant's items
that stand together are one message; what cannot belong to the same reply begins the next.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wingbeat.core.errors import RequestError
from wingbeat.server.calls.dialects.blocks import (
    as_list,
    as_object,
    as_text,
    check_new_id,
    joined_text,
    shown,
    unsupported,
)
from wingbeat.tracking.messages import Message, parse_message

INPUT_TEXT = ("input_text", "output_text", "text")
REASONING_TEXT = ("reasoning_text", "summary_text", "text")
ITEMS = ("function_call", "function_call_output", "message", "reasoning")
ENCRYPTED_PREFIX = "wingbeat-reasoning-1:"
THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\n*", re.DOTALL)
"""Reasoning that a client spelt as text, as some do with a reasoning item that they do not know."""


@dataclass(slots=True)
class _Reply:
    """The assistant's items of one message so far."""

    where: str
    reasoning: str | None = None
    content: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def message(self) -> Message:
        data = {"role": "assistant", "content": self.content, "reasoning_content": self.reasoning}
        return parse_message({**data, "tool_calls": self.calls}, param=self.where)


class _Conversation:
    """Collects messages; the last reply stays open while its items come in."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reply: _Reply | None = None

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._open(where, "reasoning", "content", "calls").reasoning = reasoning_text(item, where)
            case "function_call":
                call, calls = _function_call(item, where), self._open(where).calls
                check_new_id(call["id"], calls, f"{where}.call_id")
                calls.append(call)
            case "function_call_output":
                self.close()
                self.messages.append(_function_output(item, where))
            case "item_reference" | None:
                raise unsupported("item_reference", where, known=ITEMS)
            case _:
                raise unsupported(kind, where, known=ITEMS)

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, place = item.get("role"), f"{where}.content"
        if role == "assistant":
            self._text(joined_text(item.get("content"), place, types=INPUT_TEXT), where)
        elif role in ("user", "system", "developer"):
            self.close()
            text = joined_text(item.get("content"), place, types=INPUT_TEXT)
            self.messages.append(parse_message({"role": role, "content": text}, param=where))
        else:
            raise RequestError(
                f"`{where}.role` must be user, assistant, system or developer, got {shown(role)}",
                param=f"{where}.role",
            )

    def _text(self, text: str, where: str) -> None:
        thought = THOUGHT.match(text)
        if thought is not None:
            self._open(where, "reasoning", "content", "calls").reasoning = thought.group(1).strip()
            text = text[thought.end() :]
            if not text:
                return
        self._open(where, "content").content = text

    def _open(self, where: str, *fresh: str) -> _Reply:
        """The reply that an item belongs to: a new one where any of its ``fresh`` parts came already."""
        reply = self._reply
        if reply is None or any(getattr(reply, part) not in (None, []) for part in fresh):
            self.close()
            reply = self._reply = _Reply(where)
        return reply

    def close(self) -> None:
        if self._reply is not None:
            self.messages.append(self._reply.message())
            self._reply = None


def conversation(value: Any) -> tuple[Message, ...]:
    """The messages of ``input``.  Raises RequestError that names the place."""
    if isinstance(value, str):
        return (parse_message({"role": "user", "content": as_text(value, "input")}, param="input"),)
    items = as_list(value, "input")
    if not items:
        raise RequestError("`input` is empty: send a text or at least one item", param="input")
    found = _Conversation()
    for index, item in enumerate(items):
        found.add(as_object(item, f"input[{index}]"), f"input[{index}]")
    found.close()
    return tuple(found.messages)


def _function_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {
        "name": as_text(item.get("name"), f"{where}.name", empty=False),
        "arguments": as_text(item.get("arguments"), f"{where}.arguments"),
    }
    call_id = as_text(item.get("call_id"), f"{where}.call_id", empty=False)
    return {"id": call_id, "type": "function", "function": function}


def _function_output(item: Mapping[str, Any], where: str) -> Message:
    call_id = as_text(item.get("call_id"), f"{where}.call_id", empty=False)
    text = joined_text(item.get("output"), f"{where}.output", types=INPUT_TEXT)
    return parse_message({"role": "tool", "tool_call_id": call_id, "content": text}, param=where)


def reasoning_text(item: Mapping[str, Any], where: str) -> str:
    """The reasoning that an item carries: as we encrypted it, in full, or in summary; "" where it has none."""
    text = decrypt_reasoning(item.get("encrypted_content"))
    if text is not None:
        return text
    for name in ("content", "summary"):
        if item.get(name):
            return joined_text(as_list(item[name], f"{where}.{name}"), f"{where}.{name}", types=REASONING_TEXT)
    return ""


def encrypt_reasoning(text: str) -> str:
    """Opaque rather than secret: a client that keeps only ``encrypted_content`` brings the text back."""
    return ENCRYPTED_PREFIX + base64.b64encode(text.encode()).decode()


def decrypt_reasoning(value: Any) -> str | None:
    """What :func:`encrypt_reasoning` was given; None for what it did not write."""
    if not isinstance(value, str) or not value.startswith(ENCRYPTED_PREFIX):
        return None
    try:
        return base64.b64decode(value.removeprefix(ENCRYPTED_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
