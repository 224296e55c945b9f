"""Anthropic's messages and blocks as canonical messages, equal to those of every other dialect.

One message of the wire may be several of ours: each ``tool_result`` block of a user message is a
message of role ``tool``, and text before or after it a user message, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wingbeat.core.errors import RequestError, UnsupportedField
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

TEXT = ("text",)
USER_BLOCKS = ("text", "tool_result")
ASSISTANT_BLOCKS = ("redacted_thinking", "text", "thinking", "tool_use")
FAILED = "error"
"""What the model is told by a tool result that failed and says nothing."""


def conversation(messages: Any, *, system: Any) -> tuple[Message, ...]:
    """The whole conversation, its system message first.  Raises RequestError that names the place."""
    found: list[Message] = []
    if system is not None and (text := joined_text(system, "system", types=TEXT)):
        found.append(parse_message({"role": "system", "content": text}, param="system"))
    items = as_list(messages, "messages")
    if not items:
        raise RequestError("`messages` is empty: send at least one message", param="messages")
    for index, item in enumerate(items):
        found += _message(as_object(item, f"messages[{index}]"), f"messages[{index}]")
    if found[-1].role == "assistant":
        raise UnsupportedField(
            "the last message must not be the assistant's: a reply that goes on from given text (prefill) is not"
            " supported",
            param=f"messages[{len(items) - 1}]",
        )
    return tuple(found)


def _message(message: Mapping[str, Any], where: str) -> list[Message]:
    place = f"{where}.content"
    match message.get("role"):
        case "user":
            return _user(message.get("content"), place)
        case "assistant":
            return [_assistant(message.get("content"), place)]
        case "system":
            if message.get("clear_at") not in (None, "never") or message.get("output_config") is not None:
                raise UnsupportedField(
                    f"`{where}`: only the text of a system message is supported; leave the rest out", param=where
                )
            text = joined_text(message.get("content"), place, types=TEXT)
            return [parse_message({"role": "system", "content": text}, param=where)]
        case role:
            raise RequestError(
                f"`{where}.role` must be user, assistant or system, got {shown(role)}", param=f"{where}.role"
            )


def _user(content: Any, where: str) -> list[Message]:
    blocks = _blocks(content, where)
    found: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            found.append(parse_message({"role": "user", "content": "".join(texts)}, param=where))
            texts.clear()

    for place, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(as_text(block.get("text"), f"{place}.text"))
            case "tool_result":
                flush()
                found.append(_tool_result(block, place))
            case kind:
                raise unsupported(kind, place, known=USER_BLOCKS)
    if not blocks:
        texts.append("")
    flush()
    return found


def _tool_result(block: Mapping[str, Any], where: str) -> Message:
    call_id = as_text(block.get("tool_use_id"), f"{where}.tool_use_id", empty=False)
    content = block.get("content")
    text = "" if content is None else joined_text(content, f"{where}.content", types=TEXT)
    if not text and block.get("is_error") is True:
        text = FAILED
    return parse_message({"role": "tool", "tool_call_id": call_id, "content": text}, param=where)


def _assistant(content: Any, where: str) -> Message:
    """One reply: its texts joined, its tool calls in order, its thinking as reasoning.

    ``redacted_thinking`` is none of ours and cannot be shown; it counts as reasoning that was dropped.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in _blocks(content, where):
        match block.get("type"):
            case "text":
                texts.append(as_text(block.get("text"), f"{place}.text"))
            case "thinking":
                thoughts.append(as_text(block.get("thinking"), f"{place}.thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                call = _tool_use(block, place)
                check_new_id(call["id"], calls, f"{place}.id")
                calls.append(call)
            case kind:
                raise unsupported(kind, place, known=ASSISTANT_BLOCKS)
    message = {"role": "assistant", "content": "".join(texts), "reasoning_content": "".join(thoughts)}
    return parse_message({**message, "tool_calls": calls}, param=where)


def _tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {
        "name": as_text(block.get("name"), f"{where}.name", empty=False),
        "arguments": as_object(block.get("input"), f"{where}.input"),
    }
    return {"id": as_text(block.get("id"), f"{where}.id", empty=False), "type": "function", "function": function}


def _blocks(content: Any, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The blocks with their places; a plain text is one block of it."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    return [
        (f"{where}[{index}]", as_object(block, f"{where}[{index}]"))
        for index, block in enumerate(as_list(content, where))
    ]
