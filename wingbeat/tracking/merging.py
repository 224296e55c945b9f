"""How much of an episode's tokens training shares: the arithmetic behind ``inspect --merge-report``.

The same turns can be trained as one row per turn (every turn's whole prompt and reply), as merged
timelines (a chain of turns is one row), or as a tree (rows that begin alike share their beginning)::

    turns      [1,2]->[10,11]   [1,2,10,11,20]->[30]   [1,2,10,11,21]->[31]
    rows       4 + 6 + 6 = 16   merged  6 + 6 = 12     tree  1 2 10 11 (20 30 | 21 31) = 8
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.samples import TrainingSample
from wingbeat.tracking.graph import EpisodeGraph


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """Tokens of one policy; sums add up over episodes and groups."""

    episodes: int = 0
    turns: int = 0
    timelines: int = 0
    trained: int = 0
    """Sampled tokens that train."""
    rows: int = 0
    """Tokens to forward with one row per turn."""
    merged: int = 0
    """... with merged timelines."""
    tree: int = 0
    """... with one tree over all samples that were counted together."""

    def __add__(self, other: MergeCounts) -> MergeCounts:
        return MergeCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


def count_merge(graphs: Sequence[EpisodeGraph], samples: Sequence[TrainingSample], *, policy: str) -> MergeCounts:
    """Count the turns of ``policy`` in episodes whose samples are trained together (those of one group).

    Turns of which nothing trains (superseded, greedy) would be no rows either, so they are left out.
    """
    trained_turns = {turn_id for sample in samples for turn_id in sample.turn_ids}
    turns = [t for graph in graphs for t in graph.turns if t.policy == policy and t.turn_id in trained_turns]
    return MergeCounts(
        episodes=len(graphs),
        turns=len(turns),
        timelines=len(samples),
        trained=sum(sample.num_sampled for sample in samples),
        rows=sum(turn.prompt_length + turn.num_sampled for turn in turns),
        merged=sum(sample.num_tokens for sample in samples),
        tree=count_distinct(sample.tokens_T for sample in samples),
    )


def count_distinct(sequences: Iterable[NDArray[np.int32]]) -> int:
    """The number of tokens in the prefix tree of ``sequences``.

    In lexicographic order, what a sequence shares with any earlier one it shares with its neighbour.
    """
    ordered = sorted((np.asarray(sequence, ">u4") for sequence in sequences), key=lambda array: array.tobytes())
    total = 0
    previous = np.zeros(0, ">u4")
    for sequence in ordered:
        length = min(len(previous), len(sequence))
        different = np.flatnonzero(previous[:length] != sequence[:length])
        total += len(sequence) - (int(different[0]) if different.size else length)
        previous = sequence
    return total
