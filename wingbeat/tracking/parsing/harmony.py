"""gpt-oss: a reply is a row of messages in channels.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add<|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

The prompt ends with ``<|start|>assistant``, so the first message begins with its channel.
"""

from __future__ import annotations

import re

from wingbeat.tracking.formats import (
    HARMONY_CALL,
    HARMONY_CHANNEL,
    HARMONY_CONSTRAIN,
    HARMONY_END,
    HARMONY_MESSAGE,
    HARMONY_RETURN,
    HARMONY_START,
)
from wingbeat.tracking.messages import ToolCall
from wingbeat.tracking.parsing.calls import Extracted, NewId, make_call, parse_json

ENDS = re.compile("|".join(re.escape(mark) for mark in (HARMONY_END, HARMONY_CALL, HARMONY_RETURN)))
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
CHANNEL = re.compile(re.escape(HARMONY_CHANNEL) + r"\s*(\w+)")
MARKS = re.compile(f"{re.escape(HARMONY_CONSTRAIN)}|{ENDS.pattern}")


def parse_harmony(text: str, *, tools_given: bool, new_id: NewId) -> tuple[str, Extracted]:
    """(reasoning, the rest). A reply without any message mark is content as it stands."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    malformed = 0
    for part in text.split(HARMONY_START):
        header, mark, rest = part.partition(HARMONY_MESSAGE)
        if not mark:
            content.append(_bare(part, first=not content and not reasoning and not calls))
            continue
        body = ENDS.split(rest, maxsplit=1)[0]
        channel = CHANNEL.search(header)
        recipient = RECIPIENT.search(header)
        if channel is not None and channel[1] == "analysis" and recipient is None:
            reasoning.append(body)
        elif recipient is None or not tools_given:
            content.append(body)
        elif (call := make_call(recipient[1], parse_json(body), new_id=new_id)) is not None:
            calls.append(call)
        else:
            malformed += 1
            content.append(f"{header}{HARMONY_MESSAGE}{body}")
    return "\n".join(reasoning).strip(), Extracted("".join(content), tuple(calls), malformed)


def _bare(part: str, *, first: bool) -> str:
    """The words of a message that never began: without a header, marks, and the role that follows a start."""
    words = part.partition(HARMONY_CHANNEL)[0]
    return MARKS.sub("", words if first else words.removeprefix("assistant"))
