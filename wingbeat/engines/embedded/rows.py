"""Who owns which KV: running requests, and finished ones whose rows wait to be reused.

A row is a sequence of tokens with its KV in one extent.  It has one writer at most (its owner).  Prefixes
are shared by copying from any row; an idle row may also be taken over in place.  ``epoch`` counts weight
updates: only rows computed wholly under the current epoch may serve others, so no prompt is ever
conditioned on KV of other weights, whatever the policy versions are called.  For the same reason adapters
have epochs of their own and never serve one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wingbeat.engines.embedded.pool import Extent, ExtentPool, extent_size

MIN_SHARED_TOKENS = 16
"""Sharing less than this costs more than computing it again."""
MIXED_EPOCH = -1


@dataclass(slots=True, eq=False)
class Row:
    """KV of ``tokens[:computed]``; an owned row's ``tokens`` is its request's own growing list."""

    extent: Extent
    tokens: list[int]
    cache_key: str
    epoch: int
    computed: int = 0
    adapter: str = ""
    """Whose weights compute it; "": the model's own."""


@dataclass(frozen=True, slots=True)
class Match:
    """The best prefix for a sequence: usable now from ``row``, or (``pending``) once others have prefilled."""

    row: Row | None
    length: int
    pending: int
    takeover: bool


class Mover(Protocol):
    """What rows need from the tensors."""

    def ensure(self, end: int) -> None: ...
    def copy(self, source: int, target: int, *, tokens: int) -> None: ...
    def clear(self, start: int, *, tokens: int) -> None: ...


class RowTable:
    """All rows and the pool they lie in."""

    def __init__(self, pool: ExtentPool, mover: Mover) -> None:
        self._pool = pool
        self._mover = mover
        self._idle: list[Row] = []
        self._owned: list[Row] = []
        self.epoch = 0
        """Weight updates so far."""
        self._updated: dict[str, int] = {}
        """Epoch of each adapter; the others have that of the model's last update."""
        self._model_epoch = 0

    @property
    def owned(self) -> Sequence[Row]:
        return self._owned

    @property
    def idle(self) -> Sequence[Row]:
        """Least recently used first."""
        return self._idle

    @property
    def free_tokens(self) -> int:
        """Capacity that no running request holds; idle rows give way."""
        return self._pool.free_tokens + sum(r.extent.size for r in self._idle)

    def current(self, adapter: str = "") -> int:
        """The epoch of an adapter's weights."""
        return self._updated.get(adapter, self._model_epoch)

    def match(
        self, tokens: Sequence[int], *, cache_key: str, donors: Sequence[Row], idle: bool, adapter: str = ""
    ) -> Match:
        """The longest common prefix with ``donors`` (owned rows) and, if asked, idle rows, of the same adapter.

        At least the last token is left to compute, since its logits are wanted.  Idle rows of the same
        cache key are preferred; they are taken over if that keeps at least half of what they hold.
        """
        limit = len(tokens) - 1
        best, takeover = _Best(tokens, limit), False
        others: list[Row] = []
        for row in self._idle if idle else ():
            if row.adapter != adapter:
                continue
            if row.cache_key == cache_key:
                best.offer(row)
            else:
                others.append(row)
        if best.row is not None:
            takeover = 2 * best.length >= best.row.computed
        same_key = best.row
        best.handicap = MIN_SHARED_TOKENS if takeover else 0
        epoch = self.current(adapter)
        for row in (*others, *(r for r in donors if r.epoch == epoch and r.adapter == adapter)):
            best.offer(row)
        return Match(best.row, best.length, best.pending, takeover and best.row is same_key)

    def take(self, row: Row, *, tokens: list[int], keep: int, cache_key: str) -> None:
        """Hand an idle row to a request that shares its first ``keep`` tokens."""
        self._idle.remove(row)
        row.tokens, row.computed, row.cache_key = tokens, keep, cache_key
        self._owned.append(row)

    def create(
        self, tokens: list[int], *, want: int, need: int, cache_key: str, protect: Row | None, adapter: str = ""
    ) -> Row | None:
        """A new owned row with room for ``want`` tokens, or at least ``need``; None if nothing can give way."""
        extent = self._allocate(want, protect=protect) or self._allocate(need, protect=protect)
        if extent is None:
            return None
        row = Row(extent, tokens, cache_key, self.current(adapter), adapter=adapter)
        self._owned.append(row)
        return row

    def adopt(self, tokens: Sequence[int], *, cache_key: str) -> Row | None:
        """An idle row for KV that comes from elsewhere, under the current epoch; None where nothing can give way.

        The request that it is meant for takes it over, or any other with these first tokens.
        """
        extent = self._allocate(len(tokens), protect=None)
        if extent is None:
            return None
        row = Row(extent, list(tokens), cache_key, self.current(), computed=len(tokens))
        self._idle.append(row)
        return row

    def copy_prefix(self, source: Row, target: Row, *, tokens: int) -> None:
        self._mover.copy(source.extent.start, target.extent.start, tokens=tokens)
        target.computed = tokens
        target.epoch = source.epoch

    def grow(self, row: Row, *, tokens: int) -> bool:
        """Give ``row`` room for so many tokens, evicting idle rows; False (and unchanged) if there is none."""
        if row.extent.size >= tokens:
            return True
        old = row.extent
        size = extent_size(tokens)
        self._pool.free(old)
        extent = self._allocate(size, protect=row)
        if extent is None:
            self._pool.reserve(old)
            return False
        if extent.start != old.start and row.computed:
            self._mover.copy(old.start, extent.start, tokens=row.computed)
        row.extent = extent
        return True

    def release(self, row: Row, *, reusable: bool = True) -> None:
        """Its request is done with it: keep the KV for others, or drop it if it must not be shared."""
        self._owned.remove(row)
        if not reusable or row.epoch != self.current(row.adapter) or row.computed < MIN_SHARED_TOKENS:
            self._pool.free(row.extent)
            return
        row.tokens = row.tokens[: row.computed]
        self._idle.append(row)

    def scrub(self, row: Row) -> None:
        """Zero a row's KV (it may hold NaN, which masking does not contain)."""
        self._mover.clear(row.extent.start, tokens=row.extent.size)

    def computed(self, row: Row, tokens: int) -> None:
        """So many further tokens of an owned row now have KV, under the current epoch."""
        epoch = self.current(row.adapter)
        if row.epoch != epoch:
            row.epoch = MIXED_EPOCH if row.computed else epoch
        row.computed += tokens

    def new_epoch(self, *, recompute: bool, adapter: str | None = None) -> None:
        """Weights changed, those of one adapter or (None) the model's: idle rows that they computed are void.

        Owned ones start over, or go on with mixed KV.
        """
        self.epoch += 1
        if adapter is None:
            self._model_epoch = self.epoch
            self._updated.clear()
        else:
            self._updated[adapter] = self.epoch
        idle, self._idle = self._idle, []
        for row in idle:
            if adapter is None or row.adapter == adapter:
                self._pool.free(row.extent)
            else:
                self._idle.append(row)
        for row in self._owned:
            if (adapter is None or row.adapter == adapter) and (recompute or not row.computed):
                row.computed, row.epoch = 0, self.epoch

    def _allocate(self, tokens: int, *, protect: Row | None) -> Extent | None:
        while (extent := self._pool.allocate(tokens)) is None:
            victim = next((r for r in self._idle if r is not protect), None)
            if victim is None:
                return None
            self._idle.remove(victim)
            self._pool.free(victim.extent)
        self._mover.ensure(extent.start + extent.size)
        return extent


class _Best:
    """The best prefix offered so far; a row is only compared in full if it could win."""

    def __init__(self, tokens: Sequence[int], limit: int) -> None:
        self._tokens = tokens
        self._limit = limit
        self.row: Row | None = None
        self.length = 0
        self.pending = 0
        self.handicap = 0

    def offer(self, row: Row) -> None:
        limit = min(len(row.tokens), self._limit)
        if limit <= self.length or row.tokens[self.length] != self._tokens[self.length]:
            return
        common = common_prefix(row.tokens, self._tokens, limit=limit)
        ready = min(common, row.computed)
        if common > ready:  # else there is nothing to wait for, whether the row is taken or not
            self.pending = max(self.pending, common)
        if ready > self.length + self.handicap:
            self.row, self.length, self.handicap = row, ready, 0


def common_prefix(a: Sequence[int], b: Sequence[int], *, limit: int) -> int:
    """Length of the common prefix, at most ``limit``, by bisection over slices (which compare in C)."""
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
