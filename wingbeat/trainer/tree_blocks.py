"""Which stretches of queries look at which stretches of keys: a tree's attention as dense blocks.

In depth-first order the descendants of a segment are one stretch, and all of them see the whole segment.  So
a segment's keys need a single block, whose queries are the segment itself and everything below it: the
causal mask of that rectangle, aligned at its top left corner, is exactly the visibility ``k <= q < tout[k]``::

              keys of [0, 2)   [2, 4)   [4, 5)           worked instance of trainer.tree_plan
    queries 0      x
            1      x x
            2      x x          x
            3      x x          x x
            4      x x                   x

Nothing is computed in vain but the upper halves of the segments' own squares, which causal kernels skip.  A
sliding window cuts by depth, where branches end at different places, so there each pair of segments (in
tiles no longer than the window) is a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wingbeat.trainer.tree_plan import Ints, TreePlan

_MIN_TILE = 128
"""Tokens: below that a block costs more in calls than it saves in work."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``[q_start, q_stop)`` on keys ``[k_start, k_stop)``; each query sees at least one of the keys."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: Literal["causal", "full", "masked"]
    """How much is visible: the top left causal part, all, or what :func:`visible` says."""
    first: bool = False
    """No earlier block had any of these queries."""

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)

    @property
    def area(self) -> int:
        """Pairs of query and key that a kernel must look at."""
        pairs = (self.q_stop - self.q_start) * (self.k_stop - self.k_start)
        return pairs - (self.k_stop - self.k_start) ** 2 // 2 if self.kind == "causal" else pairs


def visible(plan: TreePlan, queries: slice, keys: slice, *, window: int | None) -> NDArray[np.bool_]:
    """[queries, keys] which keys a query may see; ``window`` is how many last positions, itself included."""
    q_Q1 = np.arange(queries.start, queries.stop)[:, None]
    k_1K = np.arange(keys.start, keys.stop)[None, :]
    seen_QK = (k_1K <= q_Q1) & (q_Q1 < plan.tout_T[keys][None, :])
    if window is not None:
        seen_QK &= plan.positions_T[queries][:, None] - plan.positions_T[keys][None, :] < window
    return seen_QK


def whole_block(plan: TreePlan) -> list[Block]:
    """The tree as one masked block."""
    return [Block(0, plan.num_tokens, 0, plan.num_tokens, "masked", first=True)]


def segment_blocks(plan: TreePlan, *, window: int | None) -> list[Block]:
    """The tree as the fewest blocks without waste, parents before children."""
    if window is None or window >= plan.longest_path:
        rows = zip(plan.starts_S.tolist(), plan.stops_S.tolist(), plan.touts_S.tolist(), plan.parents_S, strict=True)
        return [Block(start, tout, start, stop, "causal", first=parent < 0) for start, stop, tout, parent in rows]
    return list(_windowed(plan, window=window))


def _windowed(plan: TreePlan, *, window: int) -> Iterator[Block]:
    starts, stops = _tiles(plan, length=max(window, _MIN_TILE))
    touts, depths = plan.tout_T[starts], plan.positions_T[starts]
    met_T = np.zeros(plan.num_tokens, np.bool_)
    ends = np.searchsorted(starts, touts)
    for key in range(len(starts)):
        k_depth = int(depths[key])
        k_last = k_depth + int(stops[key] - starts[key]) - 1
        for query in range(key, int(ends[key])):
            q_depth = int(depths[query])
            q_end = min(q_depth + int(stops[query] - starts[query]), k_last + window)
            if q_end <= q_depth:
                continue
            q_start = int(starts[query])
            q_stop = q_start + q_end - q_depth
            k_start = int(starts[key]) + max(0, q_depth - window + 1 - k_depth)
            all_near = q_end - 1 - (k_depth + k_start - int(starts[key])) < window
            kind = "masked" if not all_near else "causal" if query == key else "full"
            first = not met_T[q_start:q_stop].any()
            met_T[q_start:q_stop] = True
            yield Block(q_start, q_stop, k_start, int(stops[key]), kind, first=first)


def _tiles(plan: TreePlan, *, length: int) -> tuple[Ints, Ints]:
    """Starts and stops of the segments, cut into pieces of at most ``length`` tokens."""
    cuts = [np.arange(start, stop, length) for start, stop in zip(plan.starts_S, plan.stops_S, strict=True)]
    starts = np.concatenate([np.zeros(0, np.int64), *cuts])
    return starts, np.append(starts[1:], plan.num_tokens)[: len(starts)]
