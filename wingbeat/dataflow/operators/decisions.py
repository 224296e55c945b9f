"""Applying an operator's decisions to a group: the only place where members leave or rewards change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from wingbeat.core.samples import EpisodeSamples
from wingbeat.dataflow.operators.base import Operator, OperatorFault
from wingbeat.dataflow.operators.views import Decision, Drop, EpisodeKey, EpisodeView, GroupView, Shape, view_episodes
from wingbeat.dataflow.records import Dropped, ReadyGroup

MAX_REASON = 80
"""Characters: a reason is a label of metrics, not a report."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A group after one operator."""

    group: ReadyGroup | None
    """None where nobody stays."""
    dropped: tuple[Dropped, ...] = ()
    dropped_tokens: int = 0
    num_shaped: int = 0
    """Episodes whose reward changed."""


def view_group(group: ReadyGroup, *, version: int) -> GroupView:
    """What an operator sees of a group."""
    episodes = view_episodes(group.members, group.metrics)
    return GroupView(
        id=group.group_id,
        policy=group.policy,
        task=group.task,
        size=group.size,
        num_missing=max(0, group.size - len(episodes)),
        floor_version=group.floor_version,
        version=version,
        episodes=episodes,
    )


def apply_operator(operator: Operator[Any], group: ReadyGroup, *, version: int, label: str) -> Applied:
    """Let one operator decide about a group.

    Raises OperatorFault for a decision that does not fit, or whatever the operator raises; the group
    is unchanged then, as everything here is a copy.
    """
    view = view_group(group, version=version)
    single = [d for episode in view.episodes if (d := _of_episode(operator, episode, view)) is not None]
    first = decide(group, single, label=label)
    if first.group is None:
        return first
    if single:
        view = view_group(first.group, version=version)
    second = decide(first.group, operator.on_group(view), label=label)
    return Applied(
        second.group,
        dropped=(*first.dropped, *second.dropped),
        dropped_tokens=first.dropped_tokens + second.dropped_tokens,
        num_shaped=first.num_shaped + second.num_shaped,
    )


def _of_episode(operator: Operator[Any], episode: EpisodeView, view: GroupView) -> Decision | None:
    decision = operator.on_episode(episode, view)
    if decision is not None and _checked(decision, view.policy).episode != episode.key:
        raise OperatorFault(f"on_episode was asked about {_name(episode.key)} and decided about another one")
    return decision


def decide(group: ReadyGroup, decisions: Iterable[Decision], *, label: str) -> Applied:
    """Apply decisions, at most one for each episode.  Raises OperatorFault where one does not fit."""
    agents: dict[EpisodeKey, set[str]] = {}
    for member in group.members:
        agents.setdefault(_key(member), set()).add(member.agent)
    drops: dict[EpisodeKey, str] = {}
    shapes: dict[EpisodeKey, Mapping[str, float]] = {}
    for decision in decisions:
        key = _checked(decision, group.policy).episode
        if key not in agents:
            raise OperatorFault(f"a decision names {_name(key)}, which is no episode of group {group.group_id}")
        if key in drops or key in shapes:
            raise OperatorFault(f"two decisions about {_name(key)}; return at most one for each episode")
        if isinstance(decision, Drop):
            drops[key] = f"{label}:{'_'.join(decision.reason.split())}"
        else:
            unknown = sorted(set(decision.amounts) - agents[key])
            if unknown:
                raise OperatorFault(f"{_name(key)} has no agent {unknown[0]!r}; it has {sorted(agents[key])}")
            shapes[key] = decision.amounts
    return _apply(group, drops, shapes)


def _apply(
    group: ReadyGroup, drops: Mapping[EpisodeKey, str], shapes: Mapping[EpisodeKey, Mapping[str, float]]
) -> Applied:
    if not drops and not shapes:
        return Applied(group)
    members = tuple(_shaped(m, shapes.get(_key(m), {})) for m in group.members if _key(m) not in drops)
    changed = {_key(m) for m in members} & {key for key, amounts in shapes.items() if any(amounts.values())}
    metrics = {key: value for key, value in group.metrics.items() if key not in drops}
    return Applied(
        replace(group, members=members, metrics=metrics) if members else None,
        dropped=tuple(Dropped(*key, reason) for key, reason in drops.items()),
        dropped_tokens=sum(m.num_sampled for m in group.members if _key(m) in drops),
        num_shaped=len(changed),
    )


def _shaped(member: EpisodeSamples, amounts: Mapping[str, float]) -> EpisodeSamples:
    amount = amounts.get(member.agent, 0.0)
    if amount == 0.0:
        return member
    shaped = msgspec.structs.replace(member, shaping=member.shaping + float(amount))
    if not math.isfinite(shaped.shaped_reward):
        raise OperatorFault(f"the reward of {_name(_key(member))} plus {amount} is not a finite number")
    return shaped


def _checked(decision: object, policy: str) -> Decision:
    """Decisions come from code of users': look before trusting."""
    if isinstance(decision, Drop):
        if not isinstance(decision.reason, str) or not 0 < len(decision.reason.strip()) <= MAX_REASON:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OperatorFault(f"expected a reason of 1 to {MAX_REASON} characters, got {decision.reason!r}")
        return decision
    if isinstance(decision, Shape):
        for agent, amount in decision.amounts.items():
            if not isinstance(amount, int | float) or not math.isfinite(amount):  # pyright: ignore[reportUnnecessaryIsInstance]
                whose = agent or policy
                raise OperatorFault(f"expected a finite number to add to the reward of {whose!r}, got {amount!r}")
        return decision
    raise OperatorFault(f"expected episode.drop(...), episode.shape(...) or nothing, got {decision!r}")


def _key(member: EpisodeSamples) -> EpisodeKey:
    return EpisodeKey(member.episode_id, member.attempt)


def _name(key: EpisodeKey) -> str:
    return f"episode {key.episode_id} attempt {key.attempt}"
