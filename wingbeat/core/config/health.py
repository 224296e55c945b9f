"""Configuration of the health alarms: what is watched, its limits, and what happens beyond them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wingbeat.core.config.section import Section

Reaction = Literal["off", "warn", "stop"]
_REACTION = "`warn` tells people, `stop` also ends the policy's training, `off` does not look."


class MismatchAlarm(Section):
    """Engine and trainer disagree about tokens that the trained weights themselves sampled."""

    action: Reaction = Field(default="warn", description=_REACTION)
    limit: float | None = Field(
        default=None,
        gt=0,
        description="Of `mismatch_kl/on_policy`, in nats; unset: 1e-5 for float32 policies, 0.01 for bfloat16.",
    )
    patience: int = Field(
        default=2,
        ge=1,
        description="Measured steps in a row beyond the limit before it sounds; one is enough at ten times the limit.",
    )


class RatioAlarm(Section):
    """A token's probability changed so much between sampling and training that its gradient says little."""

    action: Reaction = Field(default="warn", description=_REACTION)
    limit: float = Field(default=100.0, gt=1, description="Of `ratio/max`.")
    patience: int = Field(default=3, ge=1, description="Steps in a row beyond the limit before it sounds.")


class EntropyAlarm(Section):
    """The policy has stopped exploring before it got better."""

    action: Reaction = Field(default="warn", description=_REACTION)
    share: float = Field(
        default=0.1, gt=0, lt=1, description="Entropy below this share of that of the first steps counts as collapsed."
    )
    min_gain: float = Field(
        default=0.1,
        ge=0,
        description="... unless the reward is now higher than in the first steps by this: a solved task needs none.",
    )
    floor: float = Field(default=0.0, ge=0, description="Entropy below this counts as collapsed, whatever the reward.")
    window: int = Field(default=10, ge=1, description="Steps that are averaged, first and last.")


class GradientAlarm(Section):
    """Steps change nothing, or were skipped because their gradient was not finite."""

    action: Reaction = Field(default="warn", description=_REACTION)
    patience: int = Field(
        default=5,
        ge=1,
        description="Steps in a row with a gradient of zero before it sounds; for one that is not finite one step is"
        " enough.",
    )


class MemoryAlarm(Section):
    """A training step ran out of memory, and was repeated in smaller forwards."""

    action: Reaction = Field(default="warn", description=_REACTION)


class TokensAlarm(Section):
    """Tokens that were sampled for training are not trained."""

    action: Reaction = Field(default="warn", description=_REACTION)
    excluded_share: float = Field(
        default=0.05, ge=0, le=1, description="Share of a batch's sampled tokens that cannot train."
    )
    min_trained: int = Field(default=1, ge=0, description="Trained tokens of a batch at least.")


class HackingAlarm(Section):
    """The reward rises while episodes get much longer: perhaps length is what is rewarded."""

    action: Reaction = Field(default="warn", description=_REACTION)
    length_ratio: float = Field(default=3.0, gt=1, description="Growth of the tokens per episode that counts.")
    window: int = Field(default=10, ge=1, description="Steps that are averaged, first and last.")


class StalenessAlarm(Section):
    """A batch held tokens that are older than `dataflow.max_staleness`; this should never happen."""

    action: Reaction = Field(default="stop", description=_REACTION)


class HealthConfig(Section):
    """Alarms on the metrics of each step; docs/howto/health.md says what to do about each."""

    mismatch: MismatchAlarm = MismatchAlarm()
    ratio: RatioAlarm = RatioAlarm()
    entropy: EntropyAlarm = EntropyAlarm()
    gradient: GradientAlarm = GradientAlarm()
    memory: MemoryAlarm = MemoryAlarm()
    tokens: TokensAlarm = TokensAlarm()
    hacking: HackingAlarm = HackingAlarm()
    staleness: StalenessAlarm = StalenessAlarm()
