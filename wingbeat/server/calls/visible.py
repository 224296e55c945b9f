"""Which text of an unfinished reply is final, whatever follows.  Pure.

A reply is split into reasoning, content and tool calls when it has ended (``wingbeat.tracking.parsing``).
Until then, text is held back that may yet turn out to be something else: the beginning of a tool call, a
mark of reasoning, half a character, half a stop string, and whitespace that would be stripped before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from wingbeat.tracking.formats import (
    BRACKET_THINK,
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    HARMONY_CALL,
    HARMONY_CHANNEL,
    HARMONY_END,
    HARMONY_MESSAGE,
    HARMONY_RETURN,
    HARMONY_START,
    HERMES_CALL,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    PYTHON_TAG,
    THINK,
    ToolFormat,
)
from wingbeat.tracking.parsing.harmony import CHANNEL, RECIPIENT, parse_harmony
from wingbeat.tracking.template import ChatTemplate

Kind = Literal["reasoning", "content"]

HALF_CHARACTER = "\ufffd"

CALL_BLOCKS = {
    ToolFormat.HERMES: HERMES_CALL[0],
    ToolFormat.MISTRAL: MISTRAL_CALLS,
    ToolFormat.DEEPSEEK: DEEPSEEK_CALLS[0],
}
"""What begins the calls of a family; the words before it are content."""
EACH_CALL = {
    ToolFormat.HERMES: HERMES_CALL[0],
    ToolFormat.MISTRAL: MISTRAL_ARGUMENTS,
    ToolFormat.DEEPSEEK: DEEPSEEK_CALL[0],
}
"""What every call has once, in families that mark each."""
HARMONY_MARKS = (HARMONY_START, HARMONY_END, HARMONY_CALL, HARMONY_RETURN)


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a call's replies are read."""

    stop: tuple[str, ...] = ()
    tools_given: bool = False
    one_call: bool = False
    """The reply ends where a second tool call begins."""
    plain: bool = False
    """A completion without a chat template: no reasoning, no tool calls."""

    @property
    def ends_early(self) -> bool:
        """Whether the text may end the turn before the model does."""
        return bool(self.stop) or self.one_call


class Phase(Enum):
    """What a growing text is at, in this order."""

    START = "start"
    """Not clear yet whether it begins with reasoning."""
    REASONING = "reasoning"
    CONTENT = "content"
    CHANNELS = "channels"
    """A family of its own: any number of both."""


class Visibility:
    """Reads a text as it grows and tells what became final.

    Only what is held back is looked at again, so that a long reply costs linear time.
    """

    def __init__(self, rules: TextRules, template: ChatTemplate) -> None:
        self._rules = rules
        self._template = template
        self._tools = template.tool_format if rules.tools_given else None
        self._think = BRACKET_THINK if template.tool_format is ToolFormat.MISTRAL else THINK
        self._phase = Phase.START
        if rules.plain:
            self._phase = Phase.CONTENT
        elif template.tool_format is ToolFormat.HARMONY:
            self._phase = Phase.CHANNELS
        self._skips_newlines = False
        """Between reasoning and content."""
        self._shown: dict[Kind, list[str]] = {"reasoning": [], "content": []}
        self.until = 0
        """Where in the text what was shown ends; no mark begins before."""

    def shown(self, kind: Kind) -> str:
        """All that was told so far."""
        return "".join(self._shown[kind])

    def advance(self, text: str) -> list[tuple[Kind, str]]:
        """What became final since the last call, reasoning first."""
        if self._phase is Phase.CHANNELS:
            return self._tell(*self._channels(text))
        reasoning = content = ""
        if self._phase is Phase.START:
            self._open(text)
        if self._phase is Phase.REASONING:
            reasoning = self._reason(text)
        if self._phase is Phase.CONTENT:
            content = self._say(text)
        return self._tell(reasoning, content)

    def _tell(self, reasoning: str, content: str) -> list[tuple[Kind, str]]:
        pieces: tuple[tuple[Kind, str], ...] = (("reasoning", reasoning), ("content", content))
        news: list[tuple[Kind, str]] = [(kind, text) for kind, text in pieces if text]
        for kind, text in news:
            self._shown[kind].append(text)
        return news

    def _open(self, text: str) -> None:
        opening = self._think[0]
        start = len(text) - len(text.lstrip())
        tagged = text.startswith(opening, start)
        if not tagged and opening.startswith(text[start : start + len(opening)]):
            return
        if tagged or self._template.opens_reasoning:
            self._phase = Phase.REASONING
            self.until = start + len(opening) if tagged else start
        else:
            self._phase = Phase.CONTENT

    def _reason(self, text: str) -> str:
        closing, begin = self._think[1], self.until
        closed = text.find(closing, begin)
        if closed >= 0:
            piece = text[begin:closed].rstrip()
            self._phase, self._skips_newlines = Phase.CONTENT, True
            self.until = closed + len(closing)
        else:
            end = min(held_from(text, mark, begin) for mark in (closing, *self._rules.stop))
            piece = text[begin:end].rstrip(HALF_CHARACTER).rstrip()
            self.until = begin + len(piece)
        return piece if self._shown["reasoning"] else piece.lstrip()

    def _say(self, text: str) -> str:
        while self._skips_newlines and text.startswith("\n", self.until):
            self.until += 1
        begin = self.until
        if begin == len(text) or (self._tools is ToolFormat.LLAMA3 and self._may_be_llamas_call(text)):
            return ""
        self._skips_newlines = False
        block = CALL_BLOCKS.get(self._tools) if self._tools is not None else None
        end = min((held_from(text, mark, begin) for mark in (*self._rules.stop, block) if mark), default=len(text))
        piece = text[begin:end].rstrip(HALF_CHARACTER)
        if block is not None:
            piece = piece.rstrip()
        self.until = begin + len(piece)
        return piece

    def _may_be_llamas_call(self, text: str) -> bool:
        """There, a call is the whole reply."""
        if self._shown["content"]:
            return False
        start = self.until
        while start < len(text) and text[start].isspace():
            start += 1
        return text.startswith("{", start) or PYTHON_TAG.startswith(text[start : start + len(PYTHON_TAG)])

    def _channels(self, text: str) -> tuple[str, str]:
        """A row of messages: the last one still grows, and shows only once its header tells what it is."""
        marks = (held_from(text, stop) for stop in self._rules.stop)
        until = min((*marks, *(_partial_from(text, mark) for mark in HARMONY_MARKS)))
        text = text[:until].rstrip(HALF_CHARACTER)
        last = max(text.rfind(HARMONY_START), 0)
        header, begun, _ = text[last:].partition(HARMONY_MESSAGE)
        if not begun or CHANNEL.search(header) is None or (self._rules.tools_given and RECIPIENT.search(header)):
            text = text[:last]
        if HARMONY_CHANNEL not in text:
            return "", ""
        reasoning, found = parse_harmony(text, tools_given=self._rules.tools_given, new_id=str)
        content = found.content.rstrip() if self._rules.tools_given else found.content
        self.until = max(self.until, len(text.rstrip()))
        return reasoning[len(self.shown("reasoning")) :], content[len(self.shown("content")) :]


def call_mark(template: ChatTemplate) -> str:
    """What every tool call has once; "" in families that do not mark each."""
    return EACH_CALL.get(template.tool_format, "")


def call_begin(text: str, mark_at: int, template: ChatTemplate) -> int:
    """Where the call begins whose mark stands there."""
    return text.rfind(MISTRAL_CALLS, 0, mark_at) if template.tool_format is ToolFormat.MISTRAL else mark_at


def held_from(text: str, mark: str, begin: int = 0) -> int:
    """Where text from ``begin`` on must be held back because ``mark`` stands or may be beginning there."""
    at = text.find(mark, begin)
    return at if at >= 0 else _partial_from(text, mark, begin)


def _partial_from(text: str, mark: str, begin: int = 0) -> int:
    """Where ``mark`` may be beginning at the text's end."""
    for length in range(min(len(mark) - 1, len(text) - begin), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)
