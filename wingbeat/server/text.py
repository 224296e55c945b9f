"""The text of a turn while it grows: what is final, where a stop string ended it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wingbeat.core.types import FinishReason
from wingbeat.tracking.messages import Message
from wingbeat.tracking.parsing import MARKERS, Reply
from wingbeat.tracking.template import ChatTemplate


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

    Text that may yet turn out to be a tool call, reasoning, half a character or half a stop string
    is held back.
    """

    HOLD = ("<tool_call>", "<think>", "<|python_tag|>")

    def __init__(self, template: ChatTemplate, stop: tuple[str, ...]) -> None:
        self._template = template
        self._stop = stop
        self._text = ""
        self._sent = 0
        self.stopped = False

    def feed(self, generated: Generated) -> bool:
        """Take what was generated so far; True when a stop string ended the turn (tokens are cut there)."""
        self._text = self._decode(generated.token_ids)
        found = [(at, s) for s in self._stop if (at := self._text.find(s)) >= 0]
        if not found:
            return False
        at, stop = min(found)
        generated.truncate(self._tokens_until(generated.token_ids, stop))
        self._text = self._text[:at]
        self.stopped = True
        return True

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
        return self._template.decode(self._template.drop_special(token_ids, keep=MARKERS))

    def delta(self) -> str:
        """Text that became final since the last call."""
        end = len(self._text)
        if not self.stopped:
            for marker in (*self.HOLD, *self._stop):
                end = min(end, _hold_from(self._text, marker))
            if self._text.lstrip().startswith("{"):  # a tool call in the style that has no marker
                end = 0
            end = min(end, len(self._text.rstrip("\ufffd")))
        text, self._sent = self._text[self._sent : end], max(self._sent, end)
        return text

    def rest(self, reply: Message) -> str:
        """What of the final content was not sent yet."""
        content = reply.content or ""
        return content[self._sent :] if content.startswith(self._text[: self._sent]) else ""

    def trim(self, parsed: Reply) -> Message:
        """The reply's message, cut at the stop string."""
        if not self.stopped:
            return parsed.message
        return replace(parsed.message, content=self._text)


def _hold_from(text: str, marker: str) -> int:
    """Where text must be held back because ``marker`` stands or may be beginning there."""
    at = text.find(marker)
    if at >= 0:
        return at
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
