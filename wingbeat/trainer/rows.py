"""From a batch's samples to rows: what trains, where, and against which logprobs.

Letters: ``T`` tokens of a row, ``N`` its trained tokens, ``V`` vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.core.support import decode_support, listed_support


@dataclass(frozen=True, slots=True)
class Row:
    """One sample, with the positions that train."""

    episode: int
    """Index of its episode in the batch."""
    token_ids_T: NDArray[np.int32]
    targets_N: NDArray[np.int64]
    """Positions of the trained tokens, each >= 1, ascending."""
    sampling_logprobs_N: NDArray[np.float32]
    versions_N: NDArray[np.int32]
    temperature: float
    num_excluded: int
    """Sampled tokens that cannot train."""
    supports_N: NDArray[np.int32]
    """Each trained token's place in ``support_table``, -1 for the whole vocabulary."""
    support_table: tuple[bytes, ...] = ()
    index: int = 0
    """Its place among the batch's rows, by which per-token values are looked up."""
    turn_ids: tuple[str, ...] = ()
    """The turns that train here, in order."""
    turn_starts: tuple[int, ...] = ()
    """The position of each turn's first sampled token, trained or not."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_trained(self) -> int:
        return len(self.targets_N)

    @property
    def turns_N(self) -> NDArray[np.int64]:
        """Each trained token's turn, as its place in ``turn_ids``.  Raises ValueError where the sample does not say."""
        places_N = np.searchsorted(np.asarray(self.turn_starts, np.int64), self.targets_N, side="right") - 1
        if len(self.turn_starts) != len(self.turn_ids) or (places_N < 0).any():
            raise ValueError(
                f"row {self.index}: expected a turn for each trained token, got {len(self.turn_starts)} starts for "
                f"{len(self.turn_ids)} turns; the sample is damaged, or older than credit per turn"
            )
        return places_N

    @property
    def sequences_N(self) -> NDArray[np.int64]:
        """A number for each trained token's turn, ascending; of its run of trained tokens where no turn is named."""
        return self.turns_N if self.turn_starts else np.cumsum(np.diff(self.targets_N, prepend=-1) != 1)

    @property
    def explaining_T(self) -> NDArray[np.int32]:
        """The tokens up to the one that explains the last trained token: no later one is needed to train it."""
        return self.token_ids_T[: self.targets_N[-1]] if self.num_trained else self.token_ids_T[:0]


def build_rows(episodes: Sequence[EpisodeSamples], *, vocabulary: int) -> list[Row]:
    """One row per sample, in order.

    A sampled token is excluded (and counted) where its sampling logprob is NaN or infinite, because
    nothing can stand in for it, where it lies outside of its own support, because then logprob and support
    are not of one distribution, and at position 0, where no logits explain it.

    ``vocabulary`` is the number of logits.  Raises ValueError where a temperature is not above 0 or a
    support is damaged.
    """
    samples = [(number, sample) for number, episode in enumerate(episodes) for sample in episode.samples]
    return [
        _build_row(sample, index, episode=episode, vocabulary=vocabulary)
        for index, (episode, sample) in enumerate(samples)
    ]


def _build_row(sample: TrainingSample, index: int, *, episode: int, vocabulary: int) -> Row:
    if not (np.isfinite(sample.temperature) and sample.temperature > 0):
        raise ValueError(
            f"sample {sample.sample_id}: expected a temperature above 0, got {sample.temperature}; "
            "greedily sampled tokens cannot train"
        )
    logprobs_T = sample.sampling_logprobs_T
    sampled_T = sample.sampled_T.astype(bool)
    supports_T = sample.support_index_T
    trained_T = sampled_T & np.isfinite(logprobs_T) & _within_support(sample, vocabulary=vocabulary)
    trained_T[:1] = False
    targets_N = np.flatnonzero(trained_T)
    return Row(
        episode=episode,
        token_ids_T=sample.tokens_T,
        targets_N=targets_N,
        sampling_logprobs_N=logprobs_T[targets_N],
        versions_N=sample.versions_T[targets_N],
        temperature=sample.temperature,
        num_excluded=int(sampled_T.sum()) - len(targets_N),
        supports_N=supports_T[targets_N],
        support_table=sample.support_table,
        index=index,
        turn_ids=sample.turn_ids,
        turn_starts=sample.turn_starts,
    )


def _within_support(sample: TrainingSample, *, vocabulary: int) -> NDArray[np.bool_]:
    """[T] whether each token could have been drawn, going by its own support."""
    within_T = np.ones(sample.num_tokens, np.bool_)
    if not sample.support_index:
        return within_T
    supports_T, tokens_T = sample.support_index_T, sample.tokens_T
    order = np.argsort(supports_T, kind="stable")
    found, starts = np.unique(supports_T[order], return_index=True)
    if found.size and found[-1] >= len(sample.support_table):
        raise ValueError(
            f"sample {sample.sample_id}: expected supports below {len(sample.support_table)}, got {found[-1]}: the "
            "data is damaged"
        )
    for index, places in zip(found, np.split(order, starts[1:]), strict=True):
        if index >= 0:
            within_T[places] = _allows(sample.support_table[index], tokens_T[places], vocabulary=vocabulary)
    return within_T


def _allows(blob: bytes, tokens: NDArray[np.int32], *, vocabulary: int) -> NDArray[np.bool_]:
    ids = listed_support(blob, vocabulary=vocabulary)
    if ids is None:
        return decode_support(blob, vocabulary=vocabulary)[tokens]
    if not ids.size:
        raise ValueError("a support names no token: the data is damaged")
    return ids[np.searchsorted(ids[:-1], tokens)] == tokens


def merged_supports(rows: Sequence[Row]) -> tuple[NDArray[np.int64], tuple[bytes, ...]]:
    """Each trained token's place in one table for all rows, row by row (-1 for the whole vocabulary), and the table."""
    table: dict[bytes, int] = {}
    places = [np.zeros(0, np.int64)]
    for row in rows:
        renumbered = [table.setdefault(blob, len(table)) if blob else -1 for blob in row.support_table]
        places.append(np.asarray([*renumbered, -1], np.int64)[row.supports_N])
    return np.concatenate(places), tuple(table)


def split_by_group(episodes: Sequence[EpisodeSamples], *, parts: int, seed: int) -> list[list[int]]:
    """Deal whole groups into ``parts`` sets of episode indices, as equal in groups as possible.

    Groups are shuffled by ``seed`` first: in order of arrival, quick groups would make the first part.
    With fewer groups than ``parts`` there are as many parts as groups.  One part keeps all in order.
    """
    groups: dict[str, list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault(episode.group_id, []).append(index)
    names = list(groups)
    random.Random(seed).shuffle(names)
    count = min(parts, len(names))
    return [sorted(index for name in names[start::count] for index in groups[name]) for start in range(count)]
