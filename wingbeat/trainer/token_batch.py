"""The trained tokens of one forward as a loss sees them.

Letters: ``N`` trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from wingbeat.trainer.scores import TokenScores
from wingbeat.trainer.tree_scorer import gather

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, where exp() is still far from overflow in float32 (and rho is meaningless)."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch, all [N]."""

    policy_logprobs_N: Tensor
    sampling_logprobs_N: Tensor
    entropy_N: Tensor
    """Of the policy's distribution the token was drawn from, in nats; with a gradient where a bonus is trained."""
    advantages_N: Tensor
    weights_N: Tensor
    sequences_N: Tensor
    """int64: the turn that a token belongs to; those of one turn are neighbours."""
    on_policy_N: Tensor
    """bool: sampled by the very weights that now score it, so that any difference is numerical."""
    sft_weights_N: Tensor | None = None
    """Of the cross-entropy; None where none is trained."""
    scores: TokenScores = field(default_factory=TokenScores)

    @property
    def proximal_N(self) -> Tensor:
        """The logprobs of the policy at the step's start: its own now where it has not moved since."""
        found = self.scores.proximal_N
        return self.policy_logprobs_N.detach() if found is None else found

    def by_turn(self, values_N: Tensor, *, reduce: Literal["mean", "sum"]) -> Tensor:
        """[N] the mean or sum of the values over each token's turn.

        Forwards and backwards in one fixed order, so that replays agree.
        """
        if not values_N.numel():
            return values_N
        _, turn_N, lengths = torch.unique_consecutive(self.sequences_N, return_inverse=True, return_counts=True)
        return gather(torch.segment_reduce(values_N, reduce, lengths=lengths), turn_N)


def log_ratio(above_N: Tensor, below_N: Tensor) -> Tensor:
    """[N] ``above - below`` within +-MAX_LOG_RATIO; a probability of zero below or above gives the bound."""
    return (above_N - below_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
