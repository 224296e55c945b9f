"""Sampled tokens to the assistant's message.

The message is what the agent sees; training never reads it. So parsing may be forgiving but never
raises: a malformed tool call stays in the content, where agent and model can see it, and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from wingbeat.tracking.messages import Message, ToolCall
from wingbeat.tracking.template import ChatTemplate, ToolFormat

PYTHON_TAG = "<|python_tag|>"
MARKERS = frozenset(("<think>", "</think>", "<tool_call>", "</tool_call>", PYTHON_TAG))
"""Tokens that structure a reply: kept in its text even where the tokenizer calls them special."""

TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
"""A Hermes call; one that is not closed ends before the next."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed reply."""

    message: Message
    tool_calls_malformed: int
    """Attempts at a tool call that could not be read; their text is part of the content."""


def parse_reply(
    template: ChatTemplate, token_ids: Sequence[int], *, tools_given: bool, new_id: Callable[[], str]
) -> Reply:
    """The assistant's message in these tokens; ``new_id`` names tool calls (unique per server).

    Without tools in the request nothing is read as a tool call. Never raises on what a model wrote.
    """
    ids = list(token_ids)
    if ids and ids[-1] in template.eos_token_ids:
        ids.pop()
    text = template.decode(template.drop_special(ids, keep=MARKERS))
    reasoning, text = _split_reasoning(text, opened=template.opens_reasoning)
    calls: list[ToolCall] = []
    malformed = 0
    if tools_given:
        extract = _extract_llama3 if template.tool_format is ToolFormat.LLAMA3 else _extract_hermes
        text, calls, malformed = extract(text, new_id=new_id)
    content = text.strip() if calls else text
    return Reply(Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls)), malformed)


def _split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """(reasoning, rest). ``opened``: the prompt already ended with ``<think>``. Unclosed reasoning is all there is."""
    start = text.lstrip()
    if start.startswith("<think>"):
        start = start.removeprefix("<think>")
    elif not opened:
        return "", text
    reasoning, _, rest = start.partition("</think>")
    return reasoning.strip(), rest.lstrip("\n")


def _extract_hermes(text: str, *, new_id: Callable[[], str]) -> tuple[str, list[ToolCall], int]:
    calls: list[ToolCall] = []
    rest: list[str] = []
    malformed = position = 0
    for match in TOOL_CALL.finditer(text):
        closed = match.group().endswith("</tool_call>")
        call = _read_call(_parse_json(match.group(1)), new_id=new_id) if closed else None
        if call is None:
            malformed += 1
            continue
        calls.append(call)
        rest.append(text[position : match.start()])
        position = match.end()
    rest.append(text[position:])
    return "".join(rest), calls, malformed


def _extract_llama3(text: str, *, new_id: Callable[[], str]) -> tuple[str, list[ToolCall], int]:
    """Calls are the whole reply, several parted by ``;``. Other JSON is an answer, not a failed call."""
    tagged = text.strip().startswith(PYTHON_TAG)
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    if not tagged and not body.startswith("{"):
        return text, [], 0
    values = _parse_json_sequence(body)
    calls = [call for value in values if (call := _read_call(value, new_id=new_id)) is not None]
    if calls and len(calls) == len(values):
        return "", calls, 0
    attempted = tagged or ('"name"' in body and ('"parameters"' in body or '"arguments"' in body))
    return text, [], int(attempted)


def _read_call(value: object, *, new_id: Callable[[], str]) -> ToolCall | None:
    """A call from ``{"name": text, "arguments" | "parameters": object}``; None where it is none.

    Arguments may be spelled as a text that holds the object, as OpenAI's wire format does.
    """
    if not isinstance(value, dict):
        return None
    data = cast(Mapping[str, Any], value)
    name = data.get("name")
    arguments: object = data.get("arguments", data.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall.of(new_id(), name=name, arguments=msgspec.json.encode(arguments).decode())


def _parse_json(text: str) -> object:
    """The value, or None for anything that is no JSON (a null is no call either)."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None


def _parse_json_sequence(text: str) -> list[object]:
    """The values of ``a; b; c``; a ``;`` inside a value does not part it."""
    values: list[object] = []
    pending = ""
    for piece in text.split(";"):
        pending = f"{pending};{piece}" if pending else piece
        value = _parse_json(pending.strip())
        if value is not None:
            values.append(value)
            pending = ""
    return [*values, None] if pending.strip() else values
