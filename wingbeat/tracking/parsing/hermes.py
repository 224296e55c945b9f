"""Hermes, Qwen and most others: ``text<tool_call>{"name": …, "arguments": {…}}</tool_call>…``."""

from __future__ import annotations

import re

from wingbeat.tracking.formats import HERMES_CALL
from wingbeat.tracking.messages import ToolCall
from wingbeat.tracking.parsing.calls import Extracted, NewId, parse_json, read_call

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
"""One that is not closed ends before the next."""


def extract_hermes(text: str, new_id: NewId) -> Extracted:
    """Calls may stand anywhere; what surrounds them is content."""
    calls: list[ToolCall] = []
    rest: list[str] = []
    malformed = position = 0
    for match in CALL.finditer(text):
        closed = match.group().endswith(HERMES_CALL[1])
        call = read_call(parse_json(match.group(1)), new_id=new_id) if closed else None
        if call is None:
            malformed += 1
            continue
        calls.append(call)
        rest.append(text[position : match.start()])
        position = match.end()
    rest.append(text[position:])
    return Extracted("".join(rest), tuple(calls), malformed)
