"""Who earned what: from the rewards of a finish call to one reward per (policy, agent).

- A name that the episode does not have is refused: a policy that is not of it, an agent or a turn that took no
  part. So a misspelt name never loses a reward.
- A policy of the episode that was not called may be rewarded: an agent need not know whom it called. The reward
  is recorded, and trains nothing, because there is nothing to train; the first finish that does so is told.
- What a superseded turn earned counts for its agent like that of any other turn.
"""

from __future__ import annotations

import difflib
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
                raise _missing(policy, agent)
            continue
        result[(policy, agent)] = float(value or 0.0) + float(sum(extra))
    return result


def uncalled_policies(rewards: float | Rewards, credit: Credit) -> list[str]:
    """Policies that are rewarded by name although they took no turn."""
    if not isinstance(rewards, Rewards):
        return []
    called = {policy for policy, _ in credit.agents}
    return sorted(set(rewards.policies) - called)


def _missing(policy: str, agent: str) -> InvalidReward:
    """An agent has turns and no reward: says where one could stand."""
    name = f"{policy}:{agent}"
    who, own = (f"agent {name!r}", f"rewards.agents[{name!r}] or ") if agent else (f"policy {policy!r}", "")
    return InvalidReward(
        f"{who} took turns but got no reward; set {own}rewards.policies[{policy!r}], or pass one number for all",
        param="rewards.policies",
    )


def _check_names(rewards: Rewards, credit: Credit) -> None:
    agents = {f"{policy}:{agent}" if agent else policy for policy, agent in credit.agents}
    for field, names, known in (
        ("policies", rewards.policies, set(credit.policies)),
        ("agents", rewards.agents, agents),
        ("turns", rewards.turns, set(credit.turns)),
    ):
        unknown = sorted(set(names) - known)
        if unknown:
            near = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.5)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidReward(
                f"rewards.{field} names {unknown[0]!r}, which this episode does not have; {meant}it has"
                f" {sorted(known)[:8]}",
                param=f"rewards.{field}",
            )
