"""The text of a turn while it grows: what is final, where a stop string ended it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wingbeat.core.types import FinishReason
from wingbeat.tracking.messages import Message
from wingbeat.tracking.parsing import MARKERS, PYTHON_TAG, Reply
from wingbeat.tracking.template import ChatTemplate, ToolFormat

THINK = "<think>"
TOOL_CALL = "<tool_call>"


@dataclass(slots=True)
class Generated:
    """What has been sampled of one turn so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Run-length: (version, count)."""
    finish: FinishReason = FinishReason.ABORT

    def extend(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], version: int) -> None:
        if not token_ids:
            return
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + len(token_ids))
        else:
            self.versions.append((version, len(token_ids)))

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        del self.token_ids[count:], self.logprobs[count:]
        kept: list[tuple[int, int]] = []
        for version, length in self.versions:
            room = count - sum(n for _, n in kept)
            if room > 0:
                kept.append((version, min(length, room)))
        self.versions = kept


class TextStream:
    """The text of a growing turn: finds stop strings, and tells which text is final.

    Invariant: what was sent is a prefix of the reply's content.  Text that may yet turn out to be a
    tool call, reasoning, half a character or half a stop string is held back, and so is whitespace that
    would be stripped beside a tool call; what is held comes with :meth:`rest`.
    """

    def __init__(self, template: ChatTemplate, stop: tuple[str, ...], *, tools_given: bool) -> None:
        self._template = template
        self._stop = stop
        self._tools_given = tools_given
        self._text = ""
        self._settled = ""
        """Text before ``_start``'s tokens' own."""
        self._start = 0
        """Tokens from here are decoded anew with every feed: a few, so that a long turn costs linear time."""
        self._read = 0
        """Tokens before this stand in ``_settled``; those from ``_start`` on only give the decoder context."""
        self._sent = 0
        self._found = ""
        """The stop string that ended the turn."""

    @property
    def stopped(self) -> bool:
        return bool(self._found)

    def feed(self, generated: Generated) -> bool:
        """Take what was generated so far; True when a stop string ended the turn (tokens are cut there)."""
        self._text = self._grow(generated.token_ids)
        found = [(at, s) for s in self._stop if (at := self._text.find(s)) >= 0]
        if not found:
            return False
        at, self._found = min(found)
        generated.truncate(self._tokens_until(generated.token_ids, self._found))
        self._text = self._text[:at]
        return True

    def _grow(self, token_ids: list[int]) -> str:
        """The text of all tokens; whole characters settle, half ones wait for their other half."""
        context = self._decode(token_ids[self._start : self._read])
        news = self._decode(token_ids[self._start :])[len(context) :]
        text = self._settled + news
        if news and not news.endswith("\ufffd"):
            self._settled, self._start, self._read = text, self._read, len(token_ids)
        return text

    def _tokens_until(self, token_ids: list[int], stop: str) -> int:
        """The fewest tokens whose text contains the stop string."""
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if stop in self._decode(token_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _decode(self, token_ids: list[int]) -> str:
        if token_ids and token_ids[-1] in self._template.eos_token_ids:
            token_ids = token_ids[:-1]
        return self._template.decode(self._template.drop_special(token_ids, keep=MARKERS))

    def delta(self) -> str:
        """Text that became final since the last call."""
        end = self._sent if self.stopped else self._final_length()
        text, self._sent = self._text[self._sent : end], max(self._sent, end)
        return text

    def _final_length(self) -> int:
        """How much of the text is content, whatever follows."""
        text, start = self._text, self._text.lstrip()
        if self._template.opens_reasoning or THINK.startswith(start[: len(THINK)]):
            return 0
        end = min((_hold_from(text, stop) for stop in self._stop), default=len(text))
        if self._tools_given and self._template.tool_format is ToolFormat.LLAMA3:  # a call is the whole reply
            if start.startswith("{") or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)]):
                return 0
        elif self._tools_given:
            if text[:1].isspace():
                return 0
            end = len(text[: min(end, _hold_from(text, TOOL_CALL))].rstrip())
        return min(end, len(text.rstrip("\ufffd")))

    def rest(self, reply: Message) -> str:
        """What of the final content was not sent yet."""
        content = reply.content or ""
        return content[self._sent :] if content.startswith(self._text[: self._sent]) else ""

    def trim(self, parsed: Reply) -> Message:
        """The reply's message, cut at the stop string."""
        if not self.stopped:
            return parsed.message
        message = parsed.message
        content = message.content.partition(self._found)[0]
        return replace(
            message,
            content=content.rstrip() if message.tool_calls else content,
            reasoning=message.reasoning.partition(self._found)[0],
        )


def _hold_from(text: str, marker: str) -> int:
    """Where text must be held back because ``marker`` stands or may be beginning there."""
    at = text.find(marker)
    if at >= 0:
        return at
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
