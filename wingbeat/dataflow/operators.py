"""Filters between a finished episode and a training batch, as pure functions over whole groups.

Each takes a group and returns what stays and which members go; the buffer does the counting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wingbeat.core.samples import EpisodeSamples
from wingbeat.core.types import Outcome
from wingbeat.dataflow.records import DropReason, EpisodeRecord, ReadyGroup


@dataclass(frozen=True, slots=True)
class Filtered:
    """The outcome of a filter: ``group`` is None where no member stays."""

    group: ReadyGroup | None
    dropped: tuple[EpisodeSamples, ...] = ()
    reason: DropReason | None = None
    """Set where something was dropped."""


def counts_in_group(record: EpisodeRecord) -> bool:
    """The failure filter: only episodes that ran to their own end may reach a baseline.

    A failure of ours or of the environment says nothing about the policy; scored as 0 it would teach
    the policy to avoid whatever broke.
    """
    return record.outcome is Outcome.AGENT


def filter_stale(group: ReadyGroup, *, version: int, max_staleness: int) -> Filtered:
    """Drop members that hold a token sampled more than ``max_staleness`` versions before ``version``.

    ``version`` is that of the trainer when the batch is trained.  An episode goes as a whole, with
    all its agents, because its state in the ledger is one per (attempt, policy).
    """
    stale = {
        (member.episode_id, member.attempt)
        for member in group.members
        if member.min_version is not None and version - member.min_version > max_staleness
    }
    if not stale:
        return Filtered(group)
    kept = tuple(m for m in group.members if (m.episode_id, m.attempt) not in stale)
    dropped = tuple(m for m in group.members if (m.episode_id, m.attempt) in stale)
    return Filtered(replace(group, members=kept) if kept else None, dropped=dropped, reason=DropReason.STALE)


def filter_zero_variance(group: ReadyGroup) -> Filtered:
    """Drop a group in which all rewards of every agent's baseline are equal: its advantages are all 0.

    Groups of size 1 pass: they have no baseline within the group, so their reward itself is the signal.
    """
    if group.size == 1 or not has_zero_variance(group):
        return Filtered(group)
    return Filtered(None, dropped=group.members, reason=DropReason.ZERO_VARIANCE)


def has_zero_variance(group: ReadyGroup) -> bool:
    """Whether every agent earned the same reward in all members (exact comparison)."""
    rewards_by_agent: dict[str, set[float]] = {}
    for member in group.members:
        rewards_by_agent.setdefault(member.agent, set()).add(member.reward)
    return all(len(rewards) == 1 for rewards in rewards_by_agent.values())


def filter_no_tokens(group: ReadyGroup) -> Filtered:
    """Drop a group none of whose members sampled a token of the policy: nothing could train."""
    if any(member.num_sampled for member in group.members):
        return Filtered(group)
    return Filtered(None, dropped=group.members, reason=DropReason.NO_TOKENS)
