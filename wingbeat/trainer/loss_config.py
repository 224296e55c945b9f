"""What a loss depends on, resolved from the configuration: no unset values."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from wingbeat.core.config.trainer import Algorithm, TrainerConfig

DEFAULT_CLIP = (0.2, 0.2)
CLIPS: dict[Algorithm, tuple[float, float]] = {
    "dapo": (0.2, 0.28),
    "cispo": (1.0, 4.0),
    "gspo": (3e-4, 4e-4),
    "sapo": (1.0, inf),
    "m2po": (1.0, inf),
    "sft": (1.0, inf),
}
"""``(clip_low, clip_high)`` where they are unset.  cispo's paper has no lower bound and does not say its upper one:
weights up to 5 are the upper end of what is commonly used.  gspo: section 5.1 of its paper.  sapo, m2po and sft have
no clip."""

Bounds = tuple[float, float]
"""The lowest and the highest ratio that is trained."""
ANY: Bounds = (0.0, inf)


@dataclass(frozen=True, slots=True)
class Corrections:
    """Rollout correction, see :mod:`wingbeat.trainer.corrections`."""

    tis_cap: float = inf
    sequence_tis_cap: float | None = None
    """Replaces the token's weight by its turn's; None: it does not."""
    mis: Bounds = ANY
    sequence_mis: Bounds = ANY
    sequence_mask: Bounds = ANY


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """Towards the reference, see :mod:`wingbeat.trainer.kl`."""

    coef: float = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"

    @property
    def in_loss(self) -> bool:
        return self.coef > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coef > 0 and self.place == "reward"


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Of one policy."""

    algorithm: Algorithm
    clip_low: float
    clip_high: float
    length_norm_tokens: int
    """Dr. GRPO's constant divisor per episode."""
    sequence_ratio: Literal["geometric_mean", "product"] = "geometric_mean"
    sapo_taus: tuple[float, float] = (1.0, 1.05)
    """For advantages above zero, and for others."""
    m2_threshold: float = 0.04
    token_mean: Literal["batch", "prompt"] = "batch"
    corrections: Corrections = field(default_factory=Corrections)
    kl: KlPenalty = field(default_factory=KlPenalty)
    entropy_coef: float = 0.0
    sft_coef: float = 0.0
    """1 for sft itself."""
    sft_min_reward: float = 1.0

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
            m2_threshold=config.m2_threshold,
            token_mean=config.token_mean,
            corrections=Corrections(
                tis_cap=config.tis_cap or inf,
                sequence_tis_cap=config.sequence_tis_cap,
                mis=_bounds(config.mis_low, config.mis_high),
                sequence_mis=_bounds(config.sequence_mis_low, config.sequence_mis_high),
                sequence_mask=_bounds(config.sequence_mask_low, config.sequence_mask_high),
            ),
            kl=KlPenalty(coef=config.kl_coef, estimator=config.kl_estimator_or_default, place=config.kl_in),
            entropy_coef=config.entropy_coef,
            sft_coef=1.0 if config.algorithm == "sft" else config.sft_coef,
            sft_min_reward=config.sft_min_reward,
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def needs_teacher(self) -> bool:
        return self.algorithm == "distill"

    @property
    def trains_every_token(self) -> bool:
        """Whether also a token whose advantage is zero has a gradient."""
        return self.kl.in_loss or self.entropy_coef > 0 or self.needs_teacher


def _bounds(low: float | None, high: float | None) -> Bounds:
    return (low or 0.0, high or inf)
