"""Policy-gradient losses as one weighted sum over tokens, and the token statistics that go with them.

Letters: ``N`` trained tokens of a micro-batch; ``rho`` the ratio of policy to sampling probability;
``A`` the advantage of the token's episode.

Every algorithm is a weighted sum of gains per token, ``loss = - sum_n w_n gain_n``.  Most share one gain,
PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347, eq. 7), taken against the *sampling*
logprobs::

    gain_n = min(rho_n A_n, clip(rho_n, 1 - clip_low, 1 + clip_high) A_n)

and differ in the weights ``w_n`` (:func:`token_weight`) and in the advantages.  The weights are fixed
for the whole batch before the first forward: their denominators are explicit and global, so splitting
a batch into micro-batches in any way gives the same gradient.  ``cispo`` and ``sapo`` have gains of their
own, ``gspo`` a ratio per turn (:func:`policy_loss`).  A turn is a run of trained tokens; no forward ever
holds a part of one.

REINFORCE and RLOO were published without ratio and clip.  Where a token is on-policy, rho is 1 and the
gradient of the surrogate is exactly theirs, ``A * grad log pi``.  Off-policy (stale samples, several
updates per batch) the papers prescribe nothing; here the ratio corrects and the clip bounds.  A
``clip_low`` of 1 and a huge ``clip_high`` leave the pure importance-weighted gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import Literal, assert_never

import torch
from torch import Tensor

from wingbeat.core.config.schema import Algorithm, TrainerConfig

DEFAULT_CLIP = (0.2, 0.2)
CLIPS: dict[Algorithm, tuple[float, float]] = {
    "dapo": (0.2, 0.28),
    "cispo": (1.0, 4.0),
    "gspo": (3e-4, 4e-4),
    "sapo": (1.0, inf),
}
"""``(clip_low, clip_high)`` where they are unset.  cispo's paper has no lower bound and does not say its upper one:
weights up to 5 are the upper end of what is commonly used.  gspo: section 5.1 of its paper.  sapo has no clip."""
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
    sequence_ratio: Literal["geometric_mean", "product"] = "geometric_mean"
    sapo_taus: tuple[float, float] = (1.0, 1.05)
    """For advantages above zero, and for others."""
    tis_cap: float = inf
    sequence_mask: tuple[float, float] = (0.0, inf)
    """Bounds of the turns that are trained, for the geometric mean of their ratios."""

    @classmethod
    def resolve(cls, config: TrainerConfig, *, context_tokens: int) -> LossConfig:
        """Fill in the defaults that depend on the algorithm or on the policy's context."""
        low, high = CLIPS.get(config.algorithm, DEFAULT_CLIP)
        if config.sequence_ratio == "product":
            low, high = DEFAULT_CLIP
        return cls(
            algorithm=config.algorithm,
            clip_low=low if config.clip_low is None else config.clip_low,
            clip_high=high if config.clip_high is None else config.clip_high,
            length_norm_tokens=config.length_norm_tokens or context_tokens,
            sequence_ratio=config.sequence_ratio,
            sapo_taus=(config.sapo_tau_positive, config.sapo_tau_negative),
            tis_cap=config.tis_cap or inf,
            sequence_mask=(config.sequence_mask_low or 0.0, config.sequence_mask_high or inf),
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
    sequences_N: Tensor
    """int64: the turn that a token belongs to; those of one turn are neighbours."""
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
    - cispo: as dapo: MiniMax (2025, arXiv 2506.13585), eq. 4.
    - gspo, sapo, reinforce_plus_plus: as grpo, mean over tokens and then over episodes: Zheng et al. (2025,
      arXiv 2507.18071), eq. 5, where the tokens of a turn share one gain; Qwen team (2025, arXiv 2511.20347);
      Hu (2025, arXiv 2501.03262).
    """
    match config.algorithm:
        case "reinforce" | "rloo":
            return 1.0 / totals.num_episodes
        case "grpo" | "gspo" | "sapo" | "reinforce_plus_plus":
            return 1.0 / (totals.num_episodes * episode_tokens)
        case "dr_grpo":
            return 1.0 / (totals.num_episodes * config.length_norm_tokens)
        case "dapo" | "cispo":
            return 1.0 / totals.num_tokens
        case _:
            assert_never(config.algorithm)


def policy_loss(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """The scalar to minimise for these tokens; sum it over micro-batches (see the module's formula).

    - cispo: ``gain = sg(clip(rho)) A log pi``: MiniMax (2025, arXiv 2506.13585), eq. 4 and 5.  The ratio is
      clipped whatever the sign of ``A``, as a weight: no token loses its gradient.
    - gspo: PPO's gain with the turn's ratio for all of its tokens, ``exp(mean log rho)``: Zheng et al. (2025,
      arXiv 2507.18071), eq. 5 to 7.  ``sequence_ratio = "product"`` is ``exp(sum log rho)``, the plain ratio of
      the turn's probabilities, whose spread grows with its length.
    - sapo: ``gain = (4 / tau) sigmoid(tau (rho - 1)) A``, tau by the sign of ``A``: Qwen team (2025, arXiv 2511.20347).
      On-policy its gradient is ``A grad log pi``; it fades with the distance, in both directions.

    Turns outside of ``sequence_mask`` gain nothing; they stay in the denominators.
    """
    gain_N = torch.where(_masked(tokens, config=config), 0.0, _gain(tokens, config=config))
    return -(tokens.weights_N * gain_N).sum()


def _gain(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    advantages_N = tokens.advantages_N
    ratio_N = _ratio(tokens, config=config)
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    match config.algorithm:
        case "cispo":
            return clipped_N.detach() * advantages_N * tokens.policy_logprobs_N
        case "sapo":
            positive, negative = config.sapo_taus
            tau_N = torch.full_like(ratio_N, negative).masked_fill(advantages_N > 0, positive)
            return torch.sigmoid(tau_N * (ratio_N - 1.0)) * (4.0 / tau_N) * advantages_N
        case _:
            gain_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
            return gain_N if config.tis_cap == inf else gain_N * _cap(ratio_N, config=config)


def _ratio(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] the ratio that the algorithm clips or gates, of each token or of its turn."""
    if config.algorithm != "gspo":
        return _log_ratio(tokens).exp()
    reduce = "mean" if config.sequence_ratio == "geometric_mean" else "sum"
    return _by_turn(_log_ratio(tokens), tokens, reduce=reduce).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _cap(ratio_N: Tensor, *, config: LossConfig) -> Tensor:
    """Truncated importance sampling: what is left of a token's gradient, ``min(rho, cap) / rho``.

    The gradient of an unclipped token becomes ``min(rho, cap) A grad log pi``: Yao et al. (2025), "Your
    efficient RL framework secretly brings you off-policy RL training", there for the ratio of trainer to
    sampler; here one ratio holds that and the staleness.  PPO's clip bounds only ratios whose advantage
    is positive.
    """
    return (config.tis_cap / ratio_N.detach()).clamp(max=1.0)


@torch.no_grad()
def _masked(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] whether the token's turn is so far from the policy that it is not trained.

    Its distance is ``exp(mean log rho)``, the geometric mean, which does not grow with the length.
    """
    low, high = config.sequence_mask
    if (low, high) == (0.0, inf):
        return torch.zeros_like(tokens.on_policy_N)
    ratio_N = _by_turn(_log_ratio(tokens), tokens, reduce="mean").exp()
    return (ratio_N < low) | (ratio_N > high)


def _by_turn(values_N: Tensor, tokens: TokenBatch, *, reduce: Literal["mean", "sum"]) -> Tensor:
    """[N] the mean or sum of the values over each token's turn; in a fixed order, so that replays agree."""
    if not values_N.numel():
        return values_N
    _, turn_N, lengths = torch.unique_consecutive(tokens.sequences_N, return_inverse=True, return_counts=True)
    return torch.segment_reduce(values_N, reduce, lengths=lengths)[turn_N]


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Sums and maxima over tokens, so that micro-batches add up exactly."""

    tokens: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    capped: float = 0.0
    masked: float = 0.0
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
                "correction/capped": self.capped / self.tokens,
                "correction/masked": self.masked / self.tokens,
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
    ``clip_ratio/low`` and ``/high`` count the tokens whose gradient the clip removes; cispo: whose weight it
    cuts.  ``correction/*`` count those whose ratio is above ``tis_cap``, and those of masked turns.
    """
    if not tokens.policy_logprobs_N.numel():
        return TokenStats()
    log_ratio_N = _log_ratio(tokens)
    ratio_N = log_ratio_N.exp()
    kl_N = torch.expm1(log_ratio_N) - log_ratio_N
    advantages_N, on_policy_N = tokens.advantages_N, tokens.on_policy_N
    clipped_N, either = _ratio(tokens, config=config), config.algorithm == "cispo"
    diff_N = (tokens.policy_logprobs_N - tokens.sampling_logprobs_N).abs()
    values = torch.stack(
        [
            tokens.entropy_N.sum(),
            kl_N.sum(),
            ((clipped_N < 1.0 - config.clip_low) & ((advantages_N < 0) | either)).sum(),
            ((clipped_N > 1.0 + config.clip_high) & ((advantages_N > 0) | either)).sum(),
            (ratio_N > config.tis_cap).sum(),
            _masked(tokens, config=config).sum(),
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
