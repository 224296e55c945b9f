"""Which process forwards which rows of a batch, so that all are done at about the same time.

A row of ``L`` tokens costs ``a L + b L^2``: its matrix products and its attention.  Rows that begin alike are cheaper
together, where what they share is forwarded once (:mod:`wingbeat.trainer.forwards`), so the unit that is dealt is a
stretch of the rows in depth-first order: a tree.  How large stretches should be is a trade: large ones share most,
small ones balance best.  Several sizes are tried, ends of stretches are moved from the costliest process to the
cheapest while that helps, and the deal whose costliest process is cheapest is taken.

Pure and deterministic: every process comes to the same answer by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import depth_first_order

UNITS_PER_RANK = (1, 2, 4, 8, 16)
"""Stretch sizes that are tried: the batch's cost / (ranks * units)."""
MOVES_PER_RANK = 8
"""How often, at most, the end of a stretch is moved from the costliest process to the cheapest."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """What tokens cost, in any unit."""

    per_token: float
    per_square: float

    @classmethod
    def of(cls, model: Any) -> RowCost:
        """By operations: a token is multiplied with each weight, and attends to half of the row in every layer."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        weights = sum(parameter.numel() for parameter in model.parameters())
        weights -= model.get_input_embeddings().weight.numel()
        return cls(per_token=float(max(1, weights)), per_square=float(config.num_hidden_layers * heads * size))

    def __call__(self, length: int, shared: int = 0) -> float:
        """Of a row whose first ``shared`` tokens another one pays for."""
        return self.per_token * (length - shared) + self.per_square * (length * length - shared * shared)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A row, with the tokens that it has in common with the one before it in depth-first order."""

    row: int
    length: int
    shared: int


@dataclass(frozen=True, slots=True)
class _Unit:
    """Neighbours in depth-first order."""

    leaves: tuple[_Leaf, ...]
    cost: float

    @classmethod
    def of(cls, leaves: Sequence[_Leaf], *, cost: RowCost) -> _Unit:
        more = sum(cost(leaf.length, leaf.shared) for leaf in leaves[1:])
        return cls(tuple(leaves), cost(leaves[0].length) + more)


@dataclass(frozen=True, slots=True)
class Deal:
    """Which rows go where."""

    ranks: tuple[tuple[int, ...], ...]
    """Places of rows, ascending, by rank."""
    costs: tuple[float, ...]
    """By rank."""


def deal(rows: Sequence[Row], *, ranks: int, cost: RowCost, shares: bool) -> Deal:
    """A partition of the rows over ``ranks``; ``shares`` says that rows which begin alike share forwards."""
    if not shares:
        leaves = [_Leaf(place, row.num_tokens, 0) for place, row in enumerate(rows)]
        return _summary(_dealt([_Unit.of([leaf], cost=cost) for leaf in leaves], ranks=ranks))
    pairs = zip(*depth_first_order(rows), strict=True)
    leaves = [_Leaf(place, len(rows[place].explaining_T), common) for place, common in pairs]
    total = sum(cost(leaf.length, leaf.shared) for leaf in leaves)
    candidates = [
        _evened(_dealt(_stretches(leaves, limit=total / (ranks * count), cost=cost), ranks=ranks), cost=cost)
        for count in UNITS_PER_RANK
    ]
    return min(map(_summary, candidates), key=lambda found: max(found.costs))


def _stretches(leaves: Sequence[_Leaf], *, limit: float, cost: RowCost) -> list[_Unit]:
    """Neighbours whose tree costs at most ``limit``, or one row."""
    parts: list[list[_Leaf]] = []
    spent = 0.0
    for leaf in leaves:
        more = cost(leaf.length, leaf.shared)
        if parts and spent + more <= limit:
            parts[-1].append(leaf)
            spent += more
        else:
            parts.append([leaf])
            spent = cost(leaf.length)
    return [_Unit.of(part, cost=cost) for part in parts]


def _dealt(units: Sequence[_Unit], *, ranks: int) -> list[list[_Unit]]:
    """The costliest unit to the cheapest rank, and so on (LPT): Graham (1969)."""
    chosen: list[list[_Unit]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit.cost, unit.leaves[0].row)):
        spent, rank = heapq.heappop(heap)
        chosen[rank].append(unit)
        heapq.heappush(heap, (spent + unit.cost, rank))
    return chosen


def _evened(chosen: list[list[_Unit]], *, cost: RowCost) -> list[list[_Unit]]:
    """Ends of stretches moved from the costliest rank to the cheapest, while the costlier of the two becomes cheaper.

    What is moved has its beginning to pay for once more.
    """
    for _ in range(MOVES_PER_RANK * len(chosen)):
        costs = [sum(unit.cost for unit in units) for units in chosen]
        donor, taker = costs.index(max(costs)), costs.index(min(costs))
        best: tuple[float, int, int] | None = None
        for place, unit in enumerate(chosen[donor]):
            saved = moved = 0.0
            for first in range(len(unit.leaves) - 1, -1, -1):
                leaf = unit.leaves[first]
                more = cost(leaf.length, leaf.shared)
                whole = moved + cost(leaf.length)
                saved, moved = saved + more, moved + more
                left = costs[donor] - (unit.cost if first == 0 else saved)
                worse = max(left, costs[taker] + whole)
                if worse < (costs[donor] if best is None else best[0]):
                    best = (worse, place, first)
        if best is None:
            break
        _, place, first = best
        unit = chosen[donor].pop(place)
        if first:
            chosen[donor].append(_Unit.of(unit.leaves[:first], cost=cost))
        chosen[taker].append(_Unit.of(unit.leaves[first:], cost=cost))
    return chosen


def _summary(chosen: Sequence[Sequence[_Unit]]) -> Deal:
    return Deal(
        tuple(tuple(sorted(leaf.row for unit in units for leaf in unit.leaves)) for units in chosen),
        tuple(sum(unit.cost for unit in units) for units in chosen),
    )
