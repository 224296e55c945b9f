"""Which earlier run a repeated request belongs to, so that a retry is answered and never sampled twice.

SDKs repeat a request when its answer was late or lost.  What marks the repetition is the same
``Idempotency-Key``, or the same body with ``x-stainless-retry-count`` above 0.  Without a mark an equal
body is a request of its own: agents do ask for several samples of one prompt.

Answers are kept while they are few and small enough, over all episodes; the oldest are let go first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wingbeat.core.errors import IdempotencyConflict

if TYPE_CHECKING:
    from wingbeat.server.calls.runs import Run

MAX_ANSWERS = 20_000
MAX_BYTES = 64 * 2**20
MAX_RUNS_OF_EPISODE = 512


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells a repetition."""

    digest: bytes
    """Of path and body."""
    idempotency_key: str = ""
    is_retry: bool = False

    @classmethod
    def of(cls, path: str, body: bytes, headers: Mapping[bytes, bytes]) -> Fingerprint:
        count = headers.get(b"x-stainless-retry-count", b"0").strip()
        return cls(
            digest=path.encode() + hashlib.sha256(body).digest(),
            idempotency_key=headers.get(b"idempotency-key", b"").decode("latin-1"),
            is_retry=count.isdigit() and bool(count.strip(b"0")),
        )


@dataclass(slots=True)
class SeenCalls:
    """The runs of one episode, or of all callers with one collect key."""

    by_digest: dict[bytes, list[Run]] = field(default_factory=dict)
    by_key: dict[str, tuple[bytes, Run]] = field(default_factory=dict)
    order: OrderedDict[Run, Fingerprint] = field(default_factory=OrderedDict)
    max_runs: int = MAX_RUNS_OF_EPISODE

    def add(self, fingerprint: Fingerprint, run: Run) -> None:
        runs = self.by_digest.setdefault(fingerprint.digest, [])
        lost = next((earlier for earlier in runs if earlier.is_orphan and not earlier.can_be_joined), None)
        if lost is not None:  # this one takes its place
            runs.remove(lost)
        runs.append(run)
        if fingerprint.idempotency_key:
            self.by_key[fingerprint.idempotency_key] = (fingerprint.digest, run)
        self.order[run] = fingerprint
        for _ in range(2):  # after many at once the number falls again
            if len(self.order) > self.max_runs:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Unless it still runs: a retry that did not find it would be sampled beside it."""
        run = next(iter(self.order))
        if not run.done:
            self.order.move_to_end(run)
            return
        fingerprint = self.order.pop(run)
        runs = self.by_digest.get(fingerprint.digest, [])
        if run in runs:
            runs.remove(run)
            if not runs:
                del self.by_digest[fingerprint.digest]
        if self.by_key.get(fingerprint.idempotency_key, (b"", None))[1] is run:
            del self.by_key[fingerprint.idempotency_key]

    def earlier(self, fingerprint: Fingerprint) -> list[Run]:
        """The runs that this request may repeat, the likeliest first.

        Raises IdempotencyConflict where its key came with another body.
        """
        if fingerprint.idempotency_key:
            known = self.by_key.get(fingerprint.idempotency_key)
            if known is None:
                return []
            if known[0] != fingerprint.digest:
                raise IdempotencyConflict(
                    f"idempotency key {fingerprint.idempotency_key!r} was used with another body;"
                    " use a new key for each request"
                )
            return [known[1]]
        if not fingerprint.is_retry:
            return []
        runs = self.by_digest.get(fingerprint.digest, [])
        orphans = sorted((run for run in runs if run.is_orphan), key=lambda run: not run.can_be_joined)
        return [*orphans, *(run for run in reversed(runs) if run not in orphans)]

    def answering(self, fingerprint: Fingerprint, *, only_orphans: bool = False) -> tuple[Run | None, Run | None]:
        """The run that answers this request; or None, and the one, if any, that its new sample replaces.

        ``only_orphans``: what anyone received is not for this caller.  Raises IdempotencyConflict.
        """
        runs = [run for run in self.earlier(fingerprint) if run.is_orphan or not only_orphans]
        for run in runs:
            if run.can_be_joined:
                return run, None
            if run.is_orphan:  # its caller got nothing: what an equal request was answered is another sample
                return None, run
        return None, runs[0] if runs else None


class ReplayBook:
    """The answers that are kept, over all episodes."""

    def __init__(self, *, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Run, int] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, seen: SeenCalls, fingerprint: Fingerprint) -> tuple[Run | None, tuple[str, ...]]:
        """The run that answers this request; or None, and the turns that its new sample replaces."""
        run, replaced = seen.answering(fingerprint)
        return run, () if replaced is None else replaced.turn_ids

    def keep(self, run: Run) -> None:
        """A run has ended: keep its answer while there is room, and its episode lasts."""
        if not run.can_be_joined:
            return
        added = self._kept[run] = run.num_bytes
        self._num_bytes += added
        while self._num_bytes > self._max_bytes or len(self._kept) > self._max_answers:
            oldest, size = self._kept.popitem(last=False)
            self._num_bytes -= size
            oldest.let_go()

    def drop(self, run: Run) -> None:
        """Its answer is given to nobody any more."""
        self._num_bytes -= self._kept.pop(run, 0)
        run.let_go()

    def forget(self, seen: SeenCalls) -> None:
        """The episode is over: nothing of it can be asked for again."""
        for run in seen.order:
            self.drop(run)
        seen.order.clear()
        seen.by_digest.clear()
        seen.by_key.clear()
