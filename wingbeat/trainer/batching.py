"""From rows to micro-batches: which rows go together, and padded tensors of them.

Rows are padded on the right: with causal attention no real token ever sees padding, so padding changes
speed only.  Rows that differ in length are packed instead, one behind another without padding
(:mod:`wingbeat.trainer.row_forwards`).  Token facts (advantage, weight, other models' opinions) are looked up per
row, however rows are packed.

Letters: ``B`` rows, ``T`` padded tokens, ``N`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.trainer.logprobs import Targets
from wingbeat.trainer.rows import Row, merged_supports
from wingbeat.trainer.scores import Scores, TokenScores
from wingbeat.trainer.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class Credit:
    """What the trained tokens of a batch earned."""

    advantages_N: Sequence[NDArray[np.float64]]
    """Of each row, by ``Row.index``: one advantage per trained token, in the order of ``Row.targets_N``."""
    weights: Sequence[float]
    """Of each episode, by ``Row.episode``: the weight of each of its trained tokens."""
    sft_weights: Sequence[float] = ()
    """Likewise of their cross-entropy; () where none is trained."""

    def of_row(self, row: Row) -> NDArray[np.float64]:
        """[N] the advantages of a row.  Raises ValueError where they are of another row."""
        found_N = self.advantages_N[row.index]
        if len(found_N) != row.num_trained:
            raise ValueError(
                f"row {row.index}: expected {row.num_trained} advantages, one per trained token, got {len(found_N)}; "
                "number the rows as build_rows does"
            )
        return found_N

    def trains(self, row: Row) -> bool:
        """Whether any of the row's tokens has an advantage."""
        return bool(self.of_row(row).any())


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What a loss needs to know of trained tokens besides the policy's opinion, all [N]."""

    sampling_logprobs_N: Tensor
    versions_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequences_N: Tensor
    """Numbers of the turns (:attr:`Row.sequences_N`), different in every row."""
    sft_weights_N: Tensor | None = None
    scores: TokenScores = field(default_factory=TokenScores)

    @classmethod
    def of(
        cls, rows: Sequence[Row], *, credit: Credit, device: torch.device, scores: Scores | None = None
    ) -> TokenFacts:
        """The facts of all rows' trained tokens, row by row."""
        counts = [row.num_trained for row in rows]
        # Not every device knows float64.
        advantages_N = torch.from_numpy(np.concatenate([credit.of_row(row) for row in rows])).to(torch.float32)

        def per_episode(values: Sequence[float]) -> Tensor:
            return _repeated([values[row.episode] for row in rows], counts).to(device)

        return cls(
            sampling_logprobs_N=torch.from_numpy(np.concatenate([row.sampling_logprobs_N for row in rows])).to(device),
            versions_N=torch.from_numpy(np.concatenate([row.versions_N for row in rows])).to(device),
            advantages_N=advantages_N.to(device),
            weights_N=per_episode(credit.weights),
            sequences_N=torch.from_numpy(_turns(rows)).to(device),
            sft_weights_N=per_episode(credit.sft_weights) if credit.sft_weights else None,
            scores=scores.of_rows(rows, device=device) if scores else TokenScores(),
        )

    def take(self, places: Tensor) -> TokenFacts:
        """Some of the tokens."""
        return TokenFacts(
            sampling_logprobs_N=self.sampling_logprobs_N[places],
            versions_N=self.versions_N[places],
            advantages_N=self.advantages_N[places],
            weights_N=self.weights_N[places],
            sequences_N=self.sequences_N[places],
            sft_weights_N=None if self.sft_weights_N is None else self.sft_weights_N[places],
            scores=self.scores.take(places),
        )

    def scored(self, logprobs_N: Tensor, entropy_N: Tensor, *, on_policy_version: int | None) -> TokenBatch:
        """The tokens with what the policy says; those sampled by ``on_policy_version`` are on-policy."""
        return TokenBatch(
            policy_logprobs_N=logprobs_N,
            sampling_logprobs_N=self.sampling_logprobs_N,
            entropy_N=entropy_N,
            advantages_N=self.advantages_N,
            weights_N=self.weights_N,
            sequences_N=self.sequences_N,
            on_policy_N=self.versions_N == (-1 if on_policy_version is None else on_policy_version),
            sft_weights_N=self.sft_weights_N,
            scores=self.scores,
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward needs; ``rows_N``, ``sources_N`` locate the hidden state that explains a target."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    rows_N: Tensor
    sources_N: Tensor
    targets: Targets
    rows: list[Row]
    """In the order of their lines."""
    num_tokens: int
    """Without padding."""


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


def padded_tokens(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    """What :func:`plan_micro_batches`'s parts hold, padding included."""
    return sum(len(part) * lengths[part[0]] for part in parts)


def plan_packs(lengths: Sequence[int], *, max_tokens: int, width: int) -> list[list[int]]:
    """Partition indices into few parts of at most ``max_tokens`` tokens and nearly equal cost, without padding.

    ``width`` is the model's hidden size: a row of ``L`` tokens costs ``L (12 width + L)``, its matrix products and
    its attention.  The costliest row goes to the cheapest part with room for it, and so on (LPT: Graham 1969, "Bounds
    on Multiprocessing Timing Anomalies").  A row longer than the budget gets a part of its own: it is never cut.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    long = [[index] for index in order if lengths[index] >= max_tokens]
    rest = order[len(long) :]
    count = _num_parts([lengths[index] for index in rest], max_tokens=max_tokens)
    while (parts := _dealt(rest, lengths, count=count, max_tokens=max_tokens, width=width)) is None:
        count += 1
    return long + parts


def _num_parts(descending: Sequence[int], *, max_tokens: int) -> int:
    """How many parts first fit takes, which is few: counting up from the least thinkable can take minutes."""
    room: list[int] = []
    for length in descending:
        place = next((place for place, left in enumerate(room) if left >= length), None)
        if place is None:
            room.append(max_tokens - length)
        else:
            room[place] -= length
    return len(room)


def _dealt(
    order: Sequence[int], lengths: Sequence[int], *, count: int, max_tokens: int, width: int
) -> list[list[int]] | None:
    """Into ``count`` parts; None where some row finds no room."""
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0] * count
    for index in order:
        length = lengths[index]
        roomy = [part for part in range(count) if tokens[part] + length <= max_tokens]
        if not roomy:
            return None
        chosen = min(roomy, key=costs.__getitem__)
        parts[chosen].append(index)
        tokens[chosen] += length
        costs[chosen] += length * (12 * width + length)
    return parts


def micro_batches(rows: Sequence[Row], *, max_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """Pack rows so that each batch has at most ``max_tokens`` tokens, padding included."""
    for part in plan_micro_batches([row.num_tokens for row in rows], max_tokens=max_tokens):
        yield collate([rows[index] for index in part], device=device)


def collate(rows: list[Row], *, device: torch.device) -> MicroBatch:
    """Rows as one padded batch."""
    width = max(row.num_tokens for row in rows)
    input_ids_BT = np.zeros((len(rows), width), np.int64)
    attention_mask_BT = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        input_ids_BT[index, : row.num_tokens] = row.token_ids_T
        attention_mask_BT[index, : row.num_tokens] = 1
    counts = [row.num_trained for row in rows]
    positions_N = np.concatenate([row.targets_N for row in rows])
    rows_N = np.repeat(np.arange(len(rows)), counts)
    supports_N, support_table = merged_supports(rows)

    def to_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        input_ids_BT=to_device(input_ids_BT),
        attention_mask_BT=to_device(attention_mask_BT),
        rows_N=to_device(rows_N),
        sources_N=to_device(positions_N - 1),
        targets=Targets(
            targets_N=to_device(input_ids_BT[rows_N, positions_N]),
            temperatures_N=_repeated([row.temperature for row in rows], counts).to(device),
            supports_N=supports_N,
            support_table=support_table,
        ),
        rows=rows,
        num_tokens=sum(row.num_tokens for row in rows),
    )


def _turns(rows: Sequence[Row]) -> NDArray[np.int64]:
    """A number for each trained token's turn, whatever its place in its row: no two rows share one."""
    return np.cumsum(np.concatenate([np.diff(row.sequences_N, prepend=-1) != 0 for row in rows]))


def _repeated(values: Sequence[float], counts: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values, np.float64), counts)).to(torch.float32)
