"""From a batch's samples to padded micro-batches of tensors.

Rows are padded on the right: with causal attention no real token ever sees padding, so padding changes
speed only.  Token facts (advantage, weight) are attached per row before rows are packed.

Letters: ``B`` rows, ``T`` padded tokens, ``N`` trained tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.core.samples import EpisodeSamples, TrainingSample


@dataclass(frozen=True, slots=True)
class Row:
    """One sample, with the positions that train."""

    episode: int
    """Index of its episode in the batch."""
    token_ids_T: NDArray[np.int32]
    targets_N: NDArray[np.int64]
    """Positions of the trained tokens, each >= 1."""
    sampling_logprobs_N: NDArray[np.float32]
    versions_N: NDArray[np.int32]
    temperature: float
    num_excluded: int
    """Sampled tokens that cannot train."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_trained(self) -> int:
        return len(self.targets_N)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward needs; ``rows_N``, ``sources_N`` locate the hidden state that explains a target."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    rows_N: Tensor
    sources_N: Tensor
    targets_N: Tensor
    temperatures_N: Tensor
    sampling_logprobs_N: Tensor
    versions_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    num_tokens: int
    """Without padding."""


def build_rows(episodes: Sequence[EpisodeSamples]) -> list[Row]:
    """One row per sample, in order.

    A sampled token is excluded (and counted) where its sampling logprob is NaN or infinite, because
    nothing can stand in for it, and at position 0, where no logits explain it.
    """
    return [_build_row(sample, index) for index, episode in enumerate(episodes) for sample in episode.samples]


def _build_row(sample: TrainingSample, episode: int) -> Row:
    if not (np.isfinite(sample.temperature) and sample.temperature > 0):
        raise ValueError(
            f"sample {sample.sample_id}: expected a temperature above 0, got {sample.temperature}; "
            "greedily sampled tokens cannot train"
        )
    logprobs_T = sample.sampling_logprobs_T
    sampled_T = sample.sampled_T.astype(bool)
    trained_T = sampled_T & np.isfinite(logprobs_T)
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
    )


def plan_micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Partition indices so that each part's ``count * longest`` stays within ``max_tokens``.

    Longest first, so that little is padded and memory peaks at once.  A row longer than the budget gets
    a part of its own: it is never cut.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    parts: list[list[int]] = []
    for index in order:
        longest = lengths[parts[-1][0]] if parts else 0
        if parts and longest * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def micro_batches(
    rows: Sequence[Row],
    *,
    advantages: Sequence[float],
    weights: Sequence[float],
    max_tokens: int,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Pack rows; ``advantages`` and ``weights`` are per episode of the batch, looked up by ``Row.episode``."""
    for part in plan_micro_batches([row.num_tokens for row in rows], max_tokens=max_tokens):
        yield _collate([rows[index] for index in part], advantages=advantages, weights=weights, device=device)


def _collate(
    rows: Sequence[Row], *, advantages: Sequence[float], weights: Sequence[float], device: torch.device
) -> MicroBatch:
    width = max(row.num_tokens for row in rows)
    input_ids_BT = np.zeros((len(rows), width), np.int64)
    attention_mask_BT = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        input_ids_BT[index, : row.num_tokens] = row.token_ids_T
        attention_mask_BT[index, : row.num_tokens] = 1
    counts = [row.num_trained for row in rows]
    positions_N = np.concatenate([row.targets_N for row in rows])
    rows_N = np.repeat(np.arange(len(rows)), counts)

    def per_row(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float64), counts)).to(torch.float32).to(device)

    def to_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        input_ids_BT=to_device(input_ids_BT),
        attention_mask_BT=to_device(attention_mask_BT),
        rows_N=to_device(rows_N),
        sources_N=to_device(positions_N - 1),
        targets_N=to_device(input_ids_BT[rows_N, positions_N]),
        temperatures_N=per_row([row.temperature for row in rows]),
        sampling_logprobs_N=to_device(np.concatenate([row.sampling_logprobs_N for row in rows])),
        versions_N=to_device(np.concatenate([row.versions_N for row in rows])),
        advantages_N=per_row([advantages[row.episode] for row in rows]),
        weights_N=per_row([weights[row.episode] for row in rows]),
        num_tokens=sum(row.num_tokens for row in rows),
    )


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
