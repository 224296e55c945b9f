"""What operators see of groups and batches, and what they may decide: all of it read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.core.types import Task


class EpisodeKey(NamedTuple):
    """Names one attempt."""

    episode_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Drop:
    """This episode does not train."""

    episode: EpisodeKey
    reason: str
    """A few words out of a small set: they become a label of metrics."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Something is added to this episode's reward."""

    episode: EpisodeKey
    amounts: Mapping[str, float]
    """By agent."""


Decision = Drop | Shape


@dataclass(frozen=True)
class AgentView:
    """What one agent of an episode did with this policy."""

    samples: EpisodeSamples
    """As they train: tokens, logprobs, versions (read-only)."""

    @property
    def name(self) -> str:
        """ "" where the caller named none."""
        return self.samples.agent

    @property
    def reported(self) -> float:
        """The reward as the client reported it."""
        return self.samples.reward

    @property
    def reward(self) -> float:
        """With what the operators before this one added."""
        return self.samples.shaped_reward

    @property
    def truncated(self) -> bool:
        """Some turn ran out of tokens."""
        return self.samples.truncated

    @cached_property
    def num_sampled(self) -> int:
        """Tokens that would train."""
        return self.samples.num_sampled

    @property
    def num_turns(self) -> int:
        return len(self.samples.turns) or sum(len(sample.turn_ids) for sample in self.samples.samples)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """What each turn was given by itself; part of ``reported``, too."""
        return tuple(turn.reward for turn in self.samples.turns)

    @cached_property
    def turn_tokens(self) -> tuple[int, ...]:
        """Tokens that would train, of each turn that trains."""
        return tuple(count for sample in self.samples.samples for count in _turn_counts(sample.turn_starts, sample))

    @cached_property
    def sampled_tokens(self) -> tuple[bytes, ...]:
        """The sampled token ids of each timeline, as int32 bytes: equal where the agent said the same."""
        return tuple(s.tokens_T[s.sampled_T.astype(bool)].tobytes() for s in self.samples.samples)


@dataclass(frozen=True)
class EpisodeView:
    """One attempt at the group's task, as one policy learns from it.

    It stays or goes as a whole, with all its agents.
    """

    key: EpisodeKey
    agents: tuple[AgentView, ...]
    metrics: Mapping[str, float]
    """What its client reported besides the reward."""

    @property
    def reward(self) -> float:
        """As shaped so far; the mean where there are several agents."""
        return _mean([agent.reward for agent in self.agents])

    @property
    def reported(self) -> float:
        """As the client reported it; the mean where there are several agents."""
        return _mean([agent.reported for agent in self.agents])

    @property
    def truncated(self) -> bool:
        return any(agent.truncated for agent in self.agents)

    @property
    def num_sampled(self) -> int:
        return sum(agent.num_sampled for agent in self.agents)

    @property
    def num_turns(self) -> int:
        return sum(agent.num_turns for agent in self.agents)

    @property
    def min_version(self) -> int | None:
        """The oldest policy version that sampled a token of it."""
        found = [v for agent in self.agents if (v := agent.samples.min_version) is not None]
        return min(found, default=None)

    def drop(self, reason: str) -> Drop:
        """The decision that this episode does not train."""
        return Drop(self.key, reason)

    def shape(self, amount: float | Mapping[str, float]) -> Shape:
        """The decision to add to the reward: one number for all agents, or one for each agent named."""
        if isinstance(amount, Mapping):
            return Shape(self.key, dict(amount))
        return Shape(self.key, {agent.name: float(amount) for agent in self.agents})


@dataclass(frozen=True)
class GroupView:
    """The episodes of one task that share a baseline, for one policy."""

    id: str
    policy: str
    task: Task
    size: int
    """Members that were asked for."""
    num_missing: int
    """Of them, those that did not finish, or that operators before this one dropped."""
    floor_version: int
    """No token of the group is older."""
    version: int
    """The policy's version when the group closed."""
    episodes: tuple[EpisodeView, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """As shaped so far, one for each episode."""
        return tuple(episode.reward for episode in self.episodes)

    @property
    def mean_reported(self) -> float:
        return _mean([episode.reported for episode in self.episodes])


@dataclass(frozen=True)
class PastGroup:
    """A group that an earlier batch trained, young enough to be trained again."""

    id: str
    step: int
    """The optimiser step that trained it first."""
    uses: int
    """How often it was trained again since."""
    staleness: int
    """Of its oldest token, if it were trained now."""
    episodes: tuple[EpisodeView, ...]


@dataclass(frozen=True)
class BatchView:
    """A batch that is about to be logged and trained."""

    policy: str
    version: int
    """The version it is trained at."""
    episodes: tuple[EpisodeView, ...]
    past: tuple[PastGroup, ...]
    """What may be added, oldest step first."""


def view_episodes(
    members: Sequence[EpisodeSamples], metrics: Mapping[tuple[str, int], Mapping[str, float]] | None = None
) -> tuple[EpisodeView, ...]:
    """Members by attempt, in the order of their first occurrence."""
    by_key: dict[EpisodeKey, list[AgentView]] = {}
    for member in members:
        by_key.setdefault(EpisodeKey(member.episode_id, member.attempt), []).append(AgentView(member))
    known = metrics or {}
    return tuple(
        EpisodeView(key, tuple(agents), MappingProxyType(dict(known.get(key, {})))) for key, agents in by_key.items()
    )


def _turn_counts(starts: tuple[int, ...], sample: TrainingSample) -> list[int]:
    flags_T: NDArray[np.uint8] = sample.sampled_T
    bounds = [*starts, len(flags_T)]
    return [int(flags_T[begin:end].sum()) for begin, end in pairwise(bounds)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
