"""Who earned what: from the rewards of a finish call to one reward per (policy, agent)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from wingbeat.core.errors import InvalidReward
from wingbeat.core.protocol import Rewards

AgentKey = tuple[str, str]
"""(policy, agent); agent is "" where the caller named none."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What an episode holds that can be rewarded."""

    agents: Collection[AgentKey]
    """Every (policy, agent) that took a turn."""
    turns: Mapping[str, AgentKey]
    """Response id to the agent it belongs to."""
    policies: Collection[str]
    """The policies of the episode, with or without turns."""


def assign_rewards(rewards: float | Rewards, credit: Credit, *, required: Collection[str]) -> dict[AgentKey, float]:
    """The reward of every agent with turns: its own, else its policy's, plus those of its turns.

    ``required`` names the policies that train: each of their agents must end up with a reward.
    Raises InvalidReward for an unknown name or a missing reward.
    """
    if not isinstance(rewards, Rewards):
        return {key: float(rewards) for key in credit.agents}
    _check_names(rewards, credit)
    result: dict[AgentKey, float] = {}
    for policy, agent in credit.agents:
        own = rewards.agents.get(f"{policy}:{agent}" if agent else policy)
        value = own if own is not None else rewards.policies.get(policy)
        extra = [r for turn, r in rewards.turns.items() if credit.turns[turn] == (policy, agent)]
        if value is None and not extra:
            if policy in required:
                raise InvalidReward(
                    f"policy {policy!r} took turns but got no reward; set rewards.policies[{policy!r}]"
                    " or pass one number for all",
                    param="rewards.policies",
                )
            continue
        result[(policy, agent)] = float(value or 0.0) + float(sum(extra))
    return result


def _check_names(rewards: Rewards, credit: Credit) -> None:
    agents = {f"{policy}:{agent}" if agent else policy for policy, agent in credit.agents}
    for field, names, known in (
        ("policies", rewards.policies, set(credit.policies)),
        ("agents", rewards.agents, agents),
        ("turns", rewards.turns, set(credit.turns)),
    ):
        unknown = sorted(set(names) - known)
        if unknown:
            raise InvalidReward(
                f"rewards.{field} names {unknown[0]!r}, which this episode does not have; it has {sorted(known)[:8]}",
                param=f"rewards.{field}",
            )
