"""Continuous batching: which tokens of which requests the next forward pass feeds.

Decoding requests are fed one token each; what is left of the step goes to prompts, first come first
served, in chunks of at most ``prefill_tokens``.  No tensors here: decisions only.

Prefixes that another request is about to compute are waited for rather than computed twice.  A request
waits only for requests admitted before it, so waiting cannot be circular.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from wingbeat.engines.embedded.options import EngineOptions
from wingbeat.engines.embedded.requests import ActiveRequest, Move, Phase, apply
from wingbeat.engines.embedded.rows import MIN_SHARED_TOKENS, Match, Row, RowTable


@dataclass(frozen=True, slots=True)
class Feed:
    """Positions ``[begin, begin + count)`` of one request go through the model this step."""

    request: ActiveRequest
    begin: int
    count: int
    prefill: bool
    """False where the one token is the last one sampled."""

    @property
    def samples(self) -> bool:
        """Whether the request's next token is sampled from this step's logits."""
        return self.begin + self.count == len(self.request.tokens)


class Batcher:
    """The waiting queue and the running set over one table of rows."""

    def __init__(self, options: EngineOptions, rows: RowTable) -> None:
        self._options = options
        self._rows = rows
        self._waiting: deque[ActiveRequest] = deque()
        self._running: list[ActiveRequest] = []
        self.prefilled_tokens = 0
        self.reused_tokens = 0

    @property
    def running(self) -> Sequence[ActiveRequest]:
        """In order of admission."""
        return self._running

    @property
    def waiting(self) -> Sequence[ActiveRequest]:
        return self._waiting

    def add(self, request: ActiveRequest) -> None:
        self._waiting.append(request)

    def finish(self, request: ActiveRequest, *, reusable: bool = True) -> None:
        """Take a request out; its row stays cached if its KV may serve others."""
        if request.phase is Phase.RUNNING:
            self._running.remove(request)
            self._rows.release(request.attached, reusable=reusable)
            request.row = None
        else:
            self._waiting.remove(request)
        apply(request, Move.FINISH)

    def schedule(self) -> list[Feed]:
        """The next step's feeds; empty only if nothing is running and nothing can be admitted."""
        self._make_room()
        feeds: list[Feed] = []
        prompts: list[tuple[int, ActiveRequest]] = []
        for i, request in enumerate(self._running):
            row = request.attached
            if request.sampled and row.computed == len(request.tokens) - 1:
                feeds.append(Feed(request, row.computed, 1, prefill=False))
            else:
                prompts.append((i, request))
        budget = self._options.prefill_tokens
        for i, request in prompts:
            row = request.attached
            if budget <= 0:
                break
            if row.computed == 0 and not self._share(request, ahead=self._running[:i]):
                continue
            budget -= self._feed_prompt(feeds, request, budget)
        self._admit(feeds, budget)
        return feeds

    def commit(self, feeds: Sequence[Feed]) -> None:
        """The forward pass over ``feeds`` is done: their KV is there."""
        for feed in feeds:
            if feed.prefill:
                self.prefilled_tokens += feed.count
            self._rows.computed(feed.request.attached, feed.count)

    def _feed_prompt(self, feeds: list[Feed], request: ActiveRequest, budget: int) -> int:
        begin = request.attached.computed
        count = min(len(request.tokens) - begin, budget)
        feeds.append(Feed(request, begin, count, prefill=True))
        return count

    def _make_room(self) -> None:
        """Grow the rows that are full, preempting the youngest requests where nothing else gives way."""
        for request in tuple(self._running):
            if request.phase is not Phase.RUNNING:
                continue
            while not self._rows.grow(request.attached, tokens=len(request.tokens)):
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    break

    def _preempt(self, request: ActiveRequest) -> None:
        """Back to the front of the queue, keeping its tokens; its KV is computed again later."""
        self._running.remove(request)
        self._rows.release(request.attached, reusable=False)
        request.row = None
        apply(request, Move.PREEMPT)
        self._waiting.appendleft(request)

    def _admit(self, feeds: list[Feed], budget: int) -> None:
        """Admit in order while there is room; pass over requests that wait for a prefix in the making."""
        deferred: list[ActiveRequest] = []
        while self._waiting and budget > 0 and len(self._running) < self._options.max_running:
            request = self._waiting.popleft()
            donors = [r.attached for r in self._running]
            match = self._match(request, donors)
            if match.pending - match.length >= MIN_SHARED_TOKENS:
                deferred.append(request)
                continue
            row = self._row_for(request, match)
            if row is None:
                deferred.append(request)
                break
            request.row = row
            apply(request, Move.ADMIT)
            self._running.append(request)
            if not request.ever_admitted:
                self.reused_tokens += row.computed
                request.ever_admitted = True
            budget -= self._feed_prompt(feeds, request, budget)
        self._waiting.extendleft(reversed(deferred))

    def _row_for(self, request: ActiveRequest, match: Match) -> Row | None:
        """A row for a request, with the matched prefix in it; None while nothing gives way."""
        tokens = request.tokens
        need = len(tokens) + 1
        if match.row is not None and match.takeover:
            self._rows.take(match.row, tokens=tokens, keep=match.length, cache_key=request.cache_key)
            if self._rows.grow(match.row, tokens=need):
                return match.row
            self._rows.release(match.row)
            match = Match(None, 0, 0, takeover=False)
        remaining = request.max_tokens - request.sampled
        want = len(tokens) + min(remaining, self._options.row_headroom_tokens)
        source = match.row if match.length >= MIN_SHARED_TOKENS else None
        keys = {"cache_key": request.cache_key, "adapter": request.adapter}
        row = self._rows.create(tokens, want=want, need=need, protect=source, **keys)
        if row is None:
            source = None
            row = self._rows.create(tokens, want=want, need=need, protect=None, **keys)
        if row is not None and source is not None:
            self._rows.copy_prefix(source, row, tokens=match.length)
        return row

    def _match(self, request: ActiveRequest, donors: Sequence[Row]) -> Match:
        return self._rows.match(
            request.tokens, cache_key=request.cache_key, donors=donors, idle=True, adapter=request.adapter
        )

    def _share(self, request: ActiveRequest, *, ahead: Sequence[ActiveRequest]) -> bool:
        """Before a row is computed from scratch again: copy what others hold; False to wait for them."""
        row = request.attached
        donors = [r.attached for r in ahead]
        match = self._match(request, donors)
        if match.pending - match.length >= MIN_SHARED_TOKENS:
            return False
        if match.row is not None and match.length >= MIN_SHARED_TOKENS:
            self._rows.copy_prefix(match.row, row, tokens=match.length)
        return True
