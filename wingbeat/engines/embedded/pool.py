"""Where KV lies: a buddy allocator over token addresses.

Extents are powers of two, aligned to their size.  So all extents of one size form a regular grid and
any stretch of that grid, holes included, is one strided view of the pool: attention over many rows
needs no gather.  Pure bookkeeping, no tensors.  Knuth, TAOCP vol. 1, section 2.5 (buddy system).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

MIN_EXTENT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Extent:
    """Tokens ``[start, start + size)`` of the pool; ``size`` is a power of two that divides ``start``."""

    start: int
    size: int

    @property
    def unit(self) -> int:
        """Place in the grid of extents of this size."""
        return self.start // self.size


def extent_size(tokens: int) -> int:
    """The smallest extent that holds so many tokens."""
    return max(MIN_EXTENT_TOKENS, 1 << (tokens - 1).bit_length())


class ExtentPool:
    """Hands out extents, lowest address first within the best-fitting size; merges buddies on return."""

    def __init__(self, capacity_tokens: int) -> None:
        self._free: dict[int, list[int]] = {}
        self._taken: dict[int, int] = {}
        self.capacity_tokens = capacity_tokens // MIN_EXTENT_TOKENS * MIN_EXTENT_TOKENS
        self.free_tokens = self.capacity_tokens
        start = 0
        remaining = self.capacity_tokens
        while remaining:
            size = 1 << (remaining.bit_length() - 1)
            self._free.setdefault(size, []).append(start)
            start += size
            remaining -= size
        self.largest_extent = max(self._free)

    def allocate(self, tokens: int) -> Extent | None:
        """An extent for so many tokens, or None where no free block is large enough."""
        size = extent_size(tokens)
        fitting = [s for s, starts in self._free.items() if s >= size and starts]
        if not fitting:
            return None
        block = min(fitting)
        start = self._free[block].pop(0)
        while block > size:
            block //= 2
            insort(self._free.setdefault(block, []), start + block)
        self._taken[start] = size
        self.free_tokens -= size
        return Extent(start, size)

    def reserve(self, extent: Extent) -> None:
        """Take back an extent freed just before, with nothing handed out in between."""
        size = next(s for s in sorted(self._free) if s >= extent.size and extent.start // s * s in self._free[s])
        start = extent.start // size * size
        self._free[size].remove(start)
        while size > extent.size:
            size //= 2
            upper = start + size
            keep_upper = extent.start >= upper
            insort(self._free.setdefault(size, []), start if keep_upper else upper)
            start = upper if keep_upper else start
        self._taken[extent.start] = extent.size
        self.free_tokens -= extent.size

    def free(self, extent: Extent) -> None:
        """Take an extent back.  Its content stays in place until the addresses are handed out again."""
        taken = self._taken.pop(extent.start, None)
        assert taken == extent.size, f"extent {extent} was not handed out (taken: {taken})"
        self.free_tokens += extent.size
        start, size = extent.start, extent.size
        while True:
            buddy = start ^ size
            peers = self._free.get(size, [])
            if buddy not in peers:
                break
            peers.remove(buddy)
            start = min(start, buddy)
            size *= 2
        insort(self._free.setdefault(size, []), start)
