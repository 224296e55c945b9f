"""Policy-gradient losses as one weighted sum over tokens, and the token statistics that go with them.

Letters: ``N`` trained tokens of a micro-batch; ``rho`` the ratio of policy to sampling probability;
``A`` the advantage of the token's episode.

All algorithms share one surrogate per token, PPO's clipped objective (Schulman et al. 2017, arXiv
1707.06347, eq. 7), taken against the *sampling* logprobs::

    loss = - sum_n  w_n * min(rho_n A_n, clip(rho_n, 1 - clip_low, 1 + clip_high) A_n)

and differ in the weights ``w_n`` (:func:`token_weight`) and in the advantages.  The weights are fixed
for the whole batch before the first forward: their denominators are explicit and global, so splitting
a batch into micro-batches in any way gives the same gradient.

REINFORCE and RLOO were published without ratio and clip.  Where a token is on-policy, rho is 1 and the
gradient of the surrogate is exactly theirs, ``A * grad log pi``.  Off-policy (stale samples, several
updates per batch) the papers prescribe nothing; here the ratio corrects and the clip bounds.  A
``clip_low`` of 1 and a huge ``clip_high`` leave the pure importance-weighted gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import assert_never

import torch
from torch import Tensor

from wingbeat.core.config.schema import Algorithm, TrainerConfig

DEFAULT_CLIP_HIGH = 0.2
DAPO_CLIP_HIGH = 0.28
MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, where exp() is still far from overflow in float32 (and rho is meaningless)."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """What a loss depends on, resolved (no unset values)."""

    algorithm: Algorithm
    clip_low: float
    clip_high: float
    length_norm_tokens: int
    """Dr. GRPO's constant divisor per episode."""

    @classmethod
    def resolve(cls, config: TrainerConfig, *, context_tokens: int) -> LossConfig:
        """Fill in the defaults that depend on the algorithm or on the policy's context."""
        default_high = DAPO_CLIP_HIGH if config.algorithm == "dapo" else DEFAULT_CLIP_HIGH
        return cls(
            algorithm=config.algorithm,
            clip_low=config.clip_low,
            clip_high=default_high if config.clip_high is None else config.clip_high,
            length_norm_tokens=config.length_norm_tokens or context_tokens,
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """The global denominators of one optimiser update."""

    num_episodes: int
    """All episodes, also those with zero advantage or without a trained token."""
    num_tokens: int
    """All trained tokens, also those with zero advantage; excluded tokens do not count."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch, all [N]."""

    policy_logprobs_N: Tensor
    sampling_logprobs_N: Tensor
    entropy_N: Tensor
    """Of the policy's distribution the token was drawn from, in nats; only measured, never trained."""
    advantages_N: Tensor
    weights_N: Tensor
    on_policy_N: Tensor
    """bool: sampled by the very weights that now score it, so that any difference is numerical."""


def token_weight(config: LossConfig, *, episode_tokens: int, totals: Totals) -> float:
    """The weight of every trained token of an episode that has ``episode_tokens`` of them in all its samples.

    - reinforce, rloo: ``1 / episodes``.  The whole episode is one action whose log-probability is the
      sum over its tokens: Ahmadian et al. (2024, arXiv 2402.14740), section on REINFORCE and RLOO.
    - grpo: ``1 / (episodes * episode_tokens)``, mean over tokens and then over episodes: Shao et al.
      (2024, arXiv 2402.03300), eq. 3.  Per episode, not per sample: a fork is not a second vote.
    - dr_grpo: ``1 / (episodes * length_norm_tokens)``: Liu et al. (2025, arXiv 2503.20783), section 3,
      where a constant replaces the length so that long failures are not favoured.
    - dapo: ``1 / tokens of the batch``: Yu et al. (2025, arXiv 2503.14476), eq. 8, over the whole
      update rather than per prompt.
    """
    match config.algorithm:
        case "reinforce" | "rloo":
            return 1.0 / totals.num_episodes
        case "grpo":
            return 1.0 / (totals.num_episodes * episode_tokens)
        case "dr_grpo":
            return 1.0 / (totals.num_episodes * config.length_norm_tokens)
        case "dapo":
            return 1.0 / totals.num_tokens
        case _:
            assert_never(config.algorithm)


def policy_loss(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """The scalar to minimise for these tokens; sum it over micro-batches (see the module's formula)."""
    ratio_N = _log_ratio(tokens).exp()
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain_N = torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
    return -(tokens.weights_N * gain_N).sum()


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Sums and maxima over tokens, so that micro-batches add up exactly."""

    tokens: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    on_policy_tokens: float = 0.0
    on_policy_mismatch_kl: float = 0.0
    max_ratio: float = 0.0
    max_on_policy_diff: float = 0.0

    def __add__(self, other: TokenStats) -> TokenStats:
        def joined(name: str) -> float:
            mine, theirs = getattr(self, name), getattr(other, name)
            return max(mine, theirs) if name.startswith("max_") else mine + theirs

        return TokenStats(**{item.name: joined(item.name) for item in fields(self)})

    def metrics(self) -> dict[str, float]:
        """Metric values; a mean over no tokens is left out rather than invented."""
        found: dict[str, float] = {}
        if self.tokens:
            found |= {
                "entropy": self.entropy / self.tokens,
                "mismatch_kl": self.mismatch_kl / self.tokens,
                "clip_ratio/low": self.clipped_low / self.tokens,
                "clip_ratio/high": self.clipped_high / self.tokens,
                "ratio/max": self.max_ratio,
            }
        if self.on_policy_tokens:
            found |= {
                "mismatch_kl/on_policy": self.on_policy_mismatch_kl / self.on_policy_tokens,
                "max_abs_logprob_diff": self.max_on_policy_diff,
            }
        return found


@torch.no_grad()
def token_stats(tokens: TokenBatch, *, config: LossConfig) -> TokenStats:
    """Measure a micro-batch.

    ``mismatch_kl`` is the k3 estimate of KL(sampling || policy), ``rho - 1 - log rho``, from tokens drawn
    by the sampler: Schulman (2020), "Approximating KL divergence"; also eq. 4 of arXiv 2402.03300.
    ``clip_ratio/low`` and ``/high`` count the tokens whose gradient the clip removes.
    """
    if not tokens.policy_logprobs_N.numel():
        return TokenStats()
    log_ratio_N = _log_ratio(tokens)
    ratio_N = log_ratio_N.exp()
    kl_N = torch.expm1(log_ratio_N) - log_ratio_N
    advantages_N, on_policy_N = tokens.advantages_N, tokens.on_policy_N
    diff_N = (tokens.policy_logprobs_N - tokens.sampling_logprobs_N).abs()
    values = torch.stack(
        [
            tokens.entropy_N.sum(),
            kl_N.sum(),
            ((ratio_N < 1.0 - config.clip_low) & (advantages_N < 0)).sum(),
            ((ratio_N > 1.0 + config.clip_high) & (advantages_N > 0)).sum(),
            on_policy_N.sum(),
            torch.where(on_policy_N, kl_N, 0.0).sum(),
            ratio_N.max(),
            torch.where(on_policy_N, diff_N, 0.0).max(),
        ]
    )
    return TokenStats(float(ratio_N.numel()), *values.tolist())


def _log_ratio(tokens: TokenBatch) -> Tensor:
    difference_N = tokens.policy_logprobs_N - tokens.sampling_logprobs_N
    return difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
