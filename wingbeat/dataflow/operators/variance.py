"""When a group holds nothing to learn from because all its members did equally well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from wingbeat.core.samples import EpisodeSamples
from wingbeat.dataflow.records import ReadyGroup

Credit = Literal["episode", "turn", "step_groups"]
TOLERANCE = 1e-9
"""Relative: a reward that was shaped to a value may miss it by a rounding error."""


@dataclass(frozen=True, slots=True)
class VarianceRule:
    """What counts as equal under a policy's credit (``trainer.credit``, ``trainer.gamma``).

    With credit per turn, members of equal total reward still differ where their turns earned differently,
    or where discounting meets different numbers of turns.  In doubt a group has variance: to train it costs
    compute, to lose it costs what it could teach.
    """

    credit: Credit = "episode"
    gamma: float = 1.0

    def is_equal(self, members: Iterable[EpisodeSamples]) -> bool:
        """Whether every agent earned the same in all its members, so that every advantage is 0."""
        by_agent: dict[str, list[EpisodeSamples]] = {}
        for member in members:
            by_agent.setdefault(member.agent, []).append(member)
        return all(self._same(own) for own in by_agent.values())

    def _same(self, members: list[EpisodeSamples]) -> bool:
        rewards = [member.shaped_reward for member in members]
        if not are_equal(rewards):
            return False
        if self.credit == "episode" or all(len(member.turns) <= 1 for member in members):
            return True
        if not any(turn.reward for member in members for turn in member.turns) and (
            self.gamma == 1.0 or not any(rewards)
        ):
            return True  # every return is the reward of the episode
        chains = [_as_chain(member) for member in members]
        return self.credit == "turn" and None not in chains and len(set(chains)) == 1


def are_equal(values: Iterable[float]) -> bool:
    """Equal but for rounding."""
    found = list(values)
    low, high = min(found), max(found)
    return high - low <= TOLERANCE * max(1.0, abs(low), abs(high))


def has_zero_variance(group: ReadyGroup, rule: VarianceRule | None = None) -> bool:
    """Whether all (shaped) rewards of every agent's baseline are equal; ``rule`` is that of the policy."""
    return (rule or VarianceRule()).is_equal(group.members)


def _as_chain(member: EpisodeSamples) -> tuple[float, ...] | None:
    """What each turn earned, where every turn continues the one before it; None where they fork."""
    turns = member.turns
    follows = all(turn.parent_id == before.turn_id for before, turn in pairwise(turns))
    return tuple(turn.reward for turn in turns) if follows else None
