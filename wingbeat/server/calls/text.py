"""A turn while it grows: its tokens and their facts, its text, and what ends it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wingbeat.core.types import FinishReason
from wingbeat.core.worker_protocol import TokenChunk
from wingbeat.server.calls.visible import Kind, TextRules, Visibility, call_begin, call_mark
from wingbeat.tracking.messages import Message
from wingbeat.tracking.parsing import Reply
from wingbeat.tracking.template import ChatTemplate


@dataclass(slots=True)
class Generated:
    """What has been sampled of one turn so far."""

    is_truncated: bool = False
    """The sampling leaves out part of the vocabulary, so that a logprob is worth nothing without its support."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    """One per token where the sampling is truncated, else none."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Run-length: (version, count)."""
    finish: FinishReason = FinishReason.ABORT

    def extend(self, chunk: TokenChunk) -> None:
        """Take a chunk.  A logprob whose support is missing becomes NaN: it could not be recomputed."""
        count = len(chunk.token_ids)
        if not count:
            return
        self.token_ids.extend(chunk.token_ids)
        if self.is_truncated:
            known = len(chunk.supports) == count
            self.supports.extend(chunk.supports if known else (b"",) * count)
            self.logprobs.extend(chunk.logprobs if known else (float("nan"),) * count)
        else:
            self.logprobs.extend(chunk.logprobs)
        if self.versions and self.versions[-1][0] == chunk.version:
            self.versions[-1] = (chunk.version, self.versions[-1][1] + count)
        else:
            self.versions.append((chunk.version, count))

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        del self.token_ids[count:], self.logprobs[count:], self.supports[count:]
        kept: list[tuple[int, int]] = []
        for version, length in self.versions:
            room = count - sum(n for _, n in kept)
            if room > 0:
                kept.append((version, min(length, room)))
        self.versions = kept


class TextStream:
    """The text of a growing turn: finds what ends it, and tells which text is final.

    Invariant: what was sent is a prefix of the reply's reasoning, then of its content; what was held back
    comes with :meth:`rest`.
    """

    def __init__(self, template: ChatTemplate, rules: TextRules) -> None:
        self._template = template
        self._rules = rules
        self._keep = frozenset[str]() if rules.plain else template.markers
        self._text = ""
        self._settled = ""
        """Text before ``_start``'s tokens' own."""
        self._start = 0
        """Tokens from here are decoded anew with every feed: a few, so that a long turn costs linear time."""
        self._read = 0
        """Tokens before this stand in ``_settled``; those from ``_start`` on only give the decoder context."""
        self._visibility = Visibility(rules, template)
        self._searched = 0
        """Nothing that ends the turn begins before."""
        self._first_call = -1
        """Where the first tool call is marked, if a second one ends the turn."""
        self.stop_text = ""
        """The stop string that ended the turn."""
        self.stopped = False

    def feed(self, generated: Generated) -> bool:
        """Take what was generated so far; True when the turn ends here (its tokens are cut accordingly)."""
        settled = len(self._settled)
        self._text = self._grow(generated.token_ids)
        ends = [
            (at, stop)
            for stop in self._rules.stop
            if (at := self._text.find(stop, max(0, self._searched - len(stop)))) >= 0
        ]
        second = self._second_call() if self._rules.one_call else -1
        self._searched = settled
        if second >= 0 and (not ends or second < min(ends)[0]):
            self._cut(generated, second, self._tokens_within(generated.token_ids, second))
        elif ends:
            at, self.stop_text = min(ends)
            self._cut(generated, at, self._tokens_until(generated.token_ids, self.stop_text))
        return self.stopped

    def _second_call(self) -> int:
        """Where a second tool call begins; -1 for nowhere, and in families that do not mark each call."""
        mark = call_mark(self._template)
        if not mark:
            return -1
        if self._first_call < 0:
            self._first_call = self._text.find(mark, max(0, self._searched - len(mark)))
        if self._first_call < 0:
            return -1
        second = self._text.find(mark, max(self._first_call + len(mark), self._searched - len(mark)))
        return call_begin(self._text, second, self._template) if second >= 0 else -1

    def _cut(self, generated: Generated, at: int, num_tokens: int) -> None:
        generated.truncate(num_tokens)
        self._text = self._text[:at]
        self.stopped = True

    def _grow(self, token_ids: list[int]) -> str:
        """The text of all tokens; whole characters settle, half ones wait for their other half."""
        context = self.decode(token_ids[self._start : self._read])
        news = self.decode(token_ids[self._start :])[len(context) :]
        text = self._settled + news
        if news and not news.endswith("\ufffd"):
            self._settled, self._start, self._read = text, self._read, len(token_ids)
        return text

    def _tokens_until(self, token_ids: list[int], stop: str) -> int:
        """The fewest tokens whose text contains the stop string."""
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if stop in self.decode(token_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _tokens_within(self, token_ids: list[int], length: int) -> int:
        """The most tokens whose text is no longer than ``length``."""
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self.decode(token_ids[:middle])) <= length:
                low = middle
            else:
                high = middle - 1
        return low

    def decode(self, token_ids: list[int]) -> str:
        """Their text, without the token that ends a turn."""
        if token_ids and token_ids[-1] in self._template.eos_token_ids:
            token_ids = token_ids[:-1]
        return self._template.decode(self._template.drop_special(token_ids, keep=self._keep))

    # --- what may be sent ---------------------------------------------------------------------

    def deltas(self) -> list[tuple[Kind, str]]:
        """What became final since the last call, reasoning first."""
        return [] if self.stopped else self._visibility.advance(self._text)

    def rest(self, reply: Message) -> list[tuple[Kind, str]]:
        """What of the finished reply was not sent yet."""
        wholes: tuple[tuple[Kind, str], ...] = (("reasoning", reply.reasoning), ("content", reply.content))
        left: list[tuple[Kind, str]] = []
        for kind, whole in wholes:
            sent = self._visibility.shown(kind)
            if len(whole) > len(sent) and whole.startswith(sent):
                left.append((kind, whole[len(sent) :]))
        return left

    def trim(self, parsed: Reply) -> Message:
        """The reply's message, cut at the stop string."""
        if not self.stop_text:
            return parsed.message
        message = parsed.message
        content = message.content.partition(self.stop_text)[0]
        return replace(
            message,
            content=content.rstrip() if message.tool_calls else content,
            reasoning=message.reasoning.partition(self.stop_text)[0],
        )

    def keep_sent(self, generated: Generated) -> Message | None:
        """Cut an abandoned turn to what its caller was sent, and that as its reply; None where nothing was.

        Only so can the caller continue from it: it knows nothing else.
        """
        reasoning, content = self._visibility.shown("reasoning"), self._visibility.shown("content")
        if not (reasoning or content):
            return None
        ids, sent = generated.token_ids, self._text[: self._visibility.until]
        count = self._tokens_within(ids, len(sent) - 1) + 1
        while count < len(ids) and not self.decode(ids[:count]).startswith(sent):  # not amid a character
            count += 1
        generated.truncate(count)
        return Message("assistant", content, reasoning=reasoning)
