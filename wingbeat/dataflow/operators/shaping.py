"""Built-in operators that change rewards.  What was reported stays beside what was added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from wingbeat.dataflow.operators.base import Operator, OperatorContext, OperatorOptions
from wingbeat.dataflow.operators.filters import RewardBounds
from wingbeat.dataflow.operators.views import AgentView, Decision, EpisodeView, GroupView


class OverlongOptions(OperatorOptions):
    """The length that is too long, and where the punishment begins."""

    max_tokens: int = Field(ge=1, description="L_max: sampled tokens from which the punishment is full.")
    buffer_tokens: int = Field(ge=1, description="L_cache: it grows over so many tokens before that.")
    penalty: float = Field(default=1.0, gt=0, description="The full punishment.")
    of: Literal["agent", "turn"] = Field(
        default="agent", description="What is measured: all tokens of an agent, or its longest turn."
    )

    @model_validator(mode="after")
    def _begins_somewhere(self) -> OverlongOptions:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"`buffer_tokens` is {self.buffer_tokens}, more than `max_tokens`, {self.max_tokens}")
        return self


class OverlongShaping(Operator[OverlongOptions]):
    """Soft punishment of long answers: DAPO, arXiv:2503.14476, eq. 13."""

    options_type = OverlongOptions

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        return _shape(episode, {agent.name: self.punishment(self._length(agent)) for agent in episode.agents})

    def punishment(self, length: int) -> float:
        """0 up to L_max - L_cache, then falling in a line to -penalty at L_max, and so it stays."""
        begin = self.options.max_tokens - self.options.buffer_tokens
        if length <= begin:
            return 0.0
        return -self.options.penalty * min(1.0, (length - begin) / self.options.buffer_tokens)

    def _length(self, agent: AgentView) -> int:
        return agent.num_sampled if self.options.of == "agent" else max(agent.turn_tokens, default=0)


class RewardClip(Operator[RewardBounds]):
    """Moves rewards into bounds."""

    options_type = RewardBounds

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        return _shape(episode, {agent.name: self._clipped(agent.reward) - agent.reward for agent in episode.agents})

    def _clipped(self, reward: float) -> float:
        low = reward if self.options.min is None else max(reward, self.options.min)
        return low if self.options.max is None else min(low, self.options.max)


class ScaleOptions(OperatorOptions):
    """A line."""

    factor: float = Field(default=1.0, description="The reward is multiplied by this.")
    offset: float = Field(default=0.0, description="Then this is added.")

    @model_validator(mode="after")
    def _does_something(self) -> ScaleOptions:
        if self.factor == 0.0:
            raise ValueError("`factor` 0 makes all rewards equal: nothing could be learnt")
        if (self.factor, self.offset) == (1.0, 0.0):
            raise ValueError("set `factor` or `offset`")
        return self


class RewardScale(Operator[ScaleOptions]):
    """Multiplies rewards by a factor and adds an offset."""

    options_type = ScaleOptions

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        factor, offset = self.options.factor, self.options.offset
        return _shape(episode, {agent.name: (factor - 1.0) * agent.reward + offset for agent in episode.agents})


class RewardShapingOptions(OperatorOptions):
    """What is worth or costs how much."""

    metrics: dict[str, float] = Field(
        default={}, description="By metric that clients report: its value times this is added, as in {steps = -0.01}."
    )
    per_turn: float = Field(default=0.0, description="Added for each turn of the agent.")
    per_token: float = Field(default=0.0, description="Added for each sampled token of the agent.")

    @model_validator(mode="after")
    def _does_something(self) -> RewardShapingOptions:
        if not any((*self.metrics.values(), self.per_turn, self.per_token)):
            raise ValueError("set `metrics`, `per_turn` or `per_token` to something other than 0")
        return self


class RewardShaping(Operator[RewardShapingOptions]):
    """Adds weighted metrics, turns and tokens to rewards.

    An episode whose client did not report a metric gets nothing for it, and is counted.
    """

    options_type = RewardShapingOptions

    def __init__(self, options: RewardShapingOptions, context: OperatorContext) -> None:
        super().__init__(options, context)
        self._missing = 0

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        weights = self.options.metrics
        self._missing += any(name not in episode.metrics for name in weights)
        common = sum(weight * episode.metrics.get(name, 0.0) for name, weight in weights.items())
        return _shape(
            episode,
            {
                agent.name: common
                + self.options.per_turn * agent.num_turns
                + self.options.per_token * agent.num_sampled
                for agent in episode.agents
            },
        )

    def metrics(self) -> Mapping[str, float]:
        return {"missing": float(self._missing)}


def _shape(episode: EpisodeView, amounts: Mapping[str, float]) -> Decision | None:
    return episode.shape(amounts) if any(amounts.values()) else None
