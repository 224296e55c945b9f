"""Which rows of an update share a forward pass: whole trees, parts of trees, one path at a time, or none.

Rows in depth-first order have the most in common with their neighbours, so a stretch of that order is a tree
that shares most of what can be shared.  A *family* is all rows with one first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import depth_first_order

MAX_SPLIT_LOSS = 1.5
"""Tokens of a tree cut to size / tokens of the tree, above which it is trained depth first, in many small forwards."""


@dataclass(frozen=True, slots=True)
class SharingRules:
    """When rows share."""

    mode: Literal["auto", "on", "off"]
    min_sharing: float
    """Of ``auto``: tokens of a tree's rows / tokens of the tree."""
    depth_first: Literal["never", "large", "always"]
    """Whether trees are trained one path at a time: where cutting them to size would cost too much, or all."""
    max_tokens: int
    """Of one forward."""


@dataclass(frozen=True, slots=True)
class Forwards:
    """A partition of an update's rows."""

    plain: list[Row]
    """To be padded and packed."""
    trees: list[list[Row]]
    """One forward each."""
    deep: list[list[Row]]
    """Trees to be trained depth first."""


def plan_forwards(rows: Sequence[Row], *, rules: SharingRules) -> Forwards:
    """Each row that trains, once.

    A row longer than ``max_tokens`` is never cut: it is forwarded with what it shares all of its tokens with.
    """
    if rules.mode == "off":
        return Forwards(plain=list(rows), trees=[], deep=[])
    plan, pooled = _Plan(rules), list[_Leaf]()
    for family in _families(rows):
        whole, parts = _tokens(family), _cut(family, max_tokens=rules.max_tokens)
        too_costly = sum(map(_tokens, parts)) > MAX_SPLIT_LOSS * whole
        if rules.depth_first == "always" or (rules.depth_first == "large" and too_costly):
            plan.assign(family, to=plan.deep)
        elif len(parts) == 1:
            pooled += family
        else:
            for part in parts:
                plan.assign(part, to=plan.trees)
    for part in _cut(pooled, max_tokens=rules.max_tokens):
        plan.assign(part, to=plan.trees)
    # In the order given, so that rows without anything in common are trained as if there were no trees.
    plain = [rows[index] for index in sorted(leaf.index for leaf in plan.plain)]
    return Forwards(plain=plain, trees=plan.trees, deep=plan.deep)


@dataclass(frozen=True, slots=True)
class _Leaf:
    row: Row
    index: int
    shared: int
    """Tokens in common with the leaf before it, in depth-first order."""


def _families(rows: Sequence[Row]) -> list[list[_Leaf]]:
    families: list[list[_Leaf]] = []
    for index, shared in zip(*depth_first_order(rows), strict=True):
        if not shared:
            families.append([])
        families[-1].append(_Leaf(rows[index], index, shared))
    return families


def _tokens(leaves: Sequence[_Leaf]) -> int:
    """Of the tree of these leaves, which are neighbours."""
    return sum(len(leaf.row.explaining_T) - (leaf.shared if place else 0) for place, leaf in enumerate(leaves))


def _cut(leaves: Sequence[_Leaf], *, max_tokens: int) -> list[list[_Leaf]]:
    """Stretches whose trees have at most ``max_tokens`` tokens, or one path."""
    parts: list[list[_Leaf]] = []
    filled = 0
    for leaf in leaves:
        length = len(leaf.row.explaining_T)
        if parts and filled + length - leaf.shared <= max(max_tokens, filled):
            parts[-1].append(leaf)
            filled += length - leaf.shared
        else:
            parts.append([leaf])
            filled = length
    return parts


class _Plan:
    """Forwards in the making."""

    def __init__(self, rules: SharingRules) -> None:
        self._rules = rules
        self.plain: list[_Leaf] = []
        self.trees: list[list[Row]] = []
        self.deep: list[list[Row]] = []

    def assign(self, leaves: Sequence[_Leaf], *, to: list[list[Row]]) -> None:
        """To ``to``, or to the plain rows where a tree would save too little."""
        sharing = sum(leaf.row.num_tokens for leaf in leaves) / _tokens(leaves)
        if self._rules.mode == "on" or sharing >= self._rules.min_sharing:
            to.append([leaf.row for leaf in leaves])
        else:
            self.plain.extend(leaves)
