"""Rows that begin alike as one tree of tokens, each token once.

Timelines of an episode that forked, sub-agents that were given the same instructions and the episodes of a
group repeat each other's beginnings.  A decoder computes the same hidden state wherever the tokens up to it
are the same, so one forward over the tree gives every row what its own forward would: Tree Training (arXiv
2511.00413).  Unlike there, nothing is weighted by how many rows share a token, which would be exact only for
losses linear in the logprob: each row gathers its own logprobs.  The plan is pure: numpy in, numpy out.

Letters: ``R`` rows, ``T`` tokens of the tree, ``S`` segments, ``E`` edges, ``N`` trained tokens of all rows.

- Tokens lie in depth-first order, so that the descendants of a token are the stretch behind it up to its
  ``tout``: query ``q`` sees key ``k`` if and only if ``k <= q < tout[k]``.
- A token's position is its depth, which is its place in every row through it.  A sliding window is a
  distance of depths, never of places in the tree.
- A segment is a longest stretch of tokens without a fork; they have one ``tout``.  A row may end inside.
- An edge is one thing for the head to score: a target token, at some temperature and support, explained by
  the token at ``source``.  Rows gather from edges; autograd adds up what they share.
- The roots are many where rows have different first tokens: a forest.

A worked instance: rows ``1 2 3 4 9`` and ``1 2 5 9``, whose tokens train from the third on.  The last
token of a row explains nothing, so it is a target only::

    place      0  1  2  3  4       segments  [0, 2) with children [2, 4) and [4, 5)
    token      1  2  3  4  5       edges     source  1 1 2 3 4
    position   0  1  2  3  2                 target  3 5 4 9 9
    tout       5  5  4  4  5       edge_N    0 2 3, 1 4
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wingbeat.trainer.rows import Row, merged_supports

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Edges:
    """What the head must score, each once, ascending by source."""

    sources_E: Ints
    """Places in the tree whose hidden states explain the targets."""
    targets_E: Ints
    temperatures_E: NDArray[np.float32]
    supports_E: Ints
    """Places in ``support_table``, -1 for the whole vocabulary."""
    support_table: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.sources_E)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """One tree (or forest) to forward, and where each row finds its logprobs."""

    tokens_T: Ints
    positions_T: Ints
    tout_T: Ints
    starts_S: Ints
    """First place of each segment, ascending, which is depth-first order: parents before children."""
    stops_S: Ints
    """Behind the last place of each segment."""
    touts_S: Ints
    """Behind the last descendant of each segment."""
    parents_S: Ints
    """The segment it continues, -1 for a root."""
    edges: Edges
    edge_N: Ints
    """The edge of each trained token: row by row as the rows were given, ascending within a row."""
    row_tokens: int
    """Tokens of all rows that train, as they would be forwarded without a tree."""

    @classmethod
    def of(cls, rows: Sequence[Row], *, shares: bool = True) -> TreePlan:
        """Plan ``rows``; one that trains nothing takes no part.  Unless it ``shares``, each is a tree of its own."""
        order, shared = depth_first_order(rows)
        shared = shared if shares else [0] * len(shared)
        builder = _Builder()
        sources: list[Ints] = [np.zeros(0, np.int64)] * len(rows)
        for index, common in zip(order, shared, strict=True):
            builder.add(rows[index].explaining_T, shared=common)
            sources[index] = builder.places(rows[index].targets_N - 1)
        edges, edge_N = _edges(rows, sources)
        return builder.plan(edges=edges, edge_N=edge_N, row_tokens=sum(rows[index].num_tokens for index in order))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_segments(self) -> int:
        return len(self.starts_S)

    @property
    def sharing(self) -> float:
        """Tokens that the rows hold per token that the tree forwards."""
        return self.row_tokens / self.num_tokens if self.num_tokens else 1.0

    @property
    def longest_path(self) -> int:
        """Tokens from a root to the deepest leaf."""
        return int(self.positions_T.max(initial=-1)) + 1


def depth_first_order(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The rows that train in depth-first order of their trie, and how many tokens each shares with the one before.

    Sorted as byte strings, rows that begin alike are neighbours, and a row precedes those it is a prefix of.
    """
    tokens = [row.explaining_T for row in rows]
    keys = [np.ascontiguousarray(ids).tobytes() for ids in tokens]
    order = sorted((index for index, row in enumerate(rows) if row.num_trained), key=keys.__getitem__)
    pairs = itertools.pairwise(order)
    return order, [0] * bool(order) + [_common_prefix(tokens[left], tokens[right]) for left, right in pairs]


def _common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


class _Builder:
    """Grows the tree row by row; the open segments are the path of the row added last."""

    def __init__(self) -> None:
        self._tokens: list[NDArray[np.int32]] = []
        self._positions: list[Ints] = []
        self._size = 0
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._depths: list[int] = []
        self._touts: list[int] = []
        self._parents: list[int] = []
        self._open: list[int] = []

    def add(self, tokens: NDArray[np.int32], *, shared: int) -> None:
        """Append what a row does not share with the row before it."""
        self._close(shared)
        fresh = len(tokens) - shared
        if not fresh:
            return
        if self._open and self._stops[self._open[-1]] == self._size:
            self._stops[self._open[-1]] += fresh
        else:
            parent = self._open[-1] if self._open else -1
            self._open.append(self._segment(self._size, self._size + fresh, depth=shared, parent=parent))
        self._tokens.append(tokens[shared:])
        self._positions.append(np.arange(shared, len(tokens), dtype=np.int64))
        self._size += fresh

    def places(self, positions: Ints) -> Ints:
        """Where in the tree the positions of the row added last lie."""
        starts = np.asarray([self._starts[segment] for segment in self._open], np.int64)
        depths = np.asarray([self._depths[segment] for segment in self._open], np.int64)
        segments = np.searchsorted(depths, positions, side="right") - 1
        return starts[segments] + positions - depths[segments]

    def plan(self, *, edges: Edges, edge_N: Ints, row_tokens: int) -> TreePlan:
        self._close(0)
        order = np.argsort(np.asarray(self._starts, np.int64))
        rank = np.empty(len(order) + 1, np.int64)
        rank[order] = np.arange(len(order))
        rank[-1] = -1  # a root's parent stays -1
        starts_S, stops_S, touts_S, parents_S = (
            np.asarray(values, np.int64)[order] for values in (self._starts, self._stops, self._touts, self._parents)
        )
        return TreePlan(
            tokens_T=np.concatenate([np.zeros(0, np.int64), *self._tokens]).astype(np.int64),
            positions_T=np.concatenate([np.zeros(0, np.int64), *self._positions]),
            tout_T=np.repeat(touts_S, stops_S - starts_S),
            starts_S=starts_S,
            stops_S=stops_S,
            touts_S=touts_S,
            parents_S=rank[parents_S],
            edges=edges,
            edge_N=edge_N,
            row_tokens=row_tokens,
        )

    def _close(self, shared: int) -> None:
        """End the segments, or the parts of them, that lie at depth ``shared`` or deeper."""
        while self._open and self._depths[self._open[-1]] >= shared:
            self._touts[self._open.pop()] = self._size
        if not self._open:
            return
        tail = self._open[-1]
        cut = self._starts[tail] + shared - self._depths[tail]
        if cut == self._stops[tail]:
            return
        # The tail keeps its number, because its children name it as their parent.
        head = self._segment(self._starts[tail], cut, depth=self._depths[tail], parent=self._parents[tail])
        self._starts[tail], self._depths[tail], self._parents[tail] = cut, shared, head
        self._touts[tail] = self._size
        self._open[-1] = head

    def _segment(self, start: int, stop: int, *, depth: int, parent: int) -> int:
        self._starts.append(start)
        self._stops.append(stop)
        self._depths.append(depth)
        self._touts.append(stop)
        self._parents.append(parent)
        return len(self._starts) - 1


def _edges(rows: Sequence[Row], sources: Sequence[Ints]) -> tuple[Edges, Ints]:
    """The distinct edges of all rows, and each trained token's edge."""
    none = [np.zeros(0, np.int64)]
    source_N = np.concatenate(none + list(sources))
    target_N = np.concatenate(none + [row.token_ids_T[row.targets_N].astype(np.int64) for row in rows])
    support_N, support_table = merged_supports(rows)
    temperatures: dict[float, int] = {}
    number_R = [temperatures.setdefault(row.temperature, len(temperatures)) for row in rows]
    temperature_N = np.repeat(np.asarray(number_R, np.int64), [row.num_trained for row in rows])
    # One integer per edge, ordered by source.
    key_N = source_N
    for values_N, count in (
        (target_N, int(target_N.max(initial=0)) + 1),
        (support_N + 1, len(support_table) + 1),
        (temperature_N, len(temperatures)),
    ):
        key_N = key_N * count + values_N
    _, first_E, edge_N = np.unique(key_N, return_index=True, return_inverse=True)
    edges = Edges(
        sources_E=source_N[first_E],
        targets_E=target_N[first_E],
        temperatures_E=np.asarray(list(temperatures), np.float32)[temperature_N[first_E]],
        supports_E=support_N[first_E],
        support_table=support_table,
    )
    return edges, edge_N.astype(np.int64)
