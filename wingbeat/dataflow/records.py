"""The values that flow between the parts of the dataflow: groups, finished episodes, what is ready to train.

::

    GroupSpec ──▶ GroupBook ──▶ ClosedGroup ──▶ ReadyGroup (one per policy) ──▶ PolicyBuffer ──▶ BatchDraft
                     ▲                                                                              │
                EpisodeRecord ──▶ Ledger ◀────────────────────────── TrainingBatch, Dropped ◀────────┘
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from wingbeat.core.errors import InvalidReward, RequestError
from wingbeat.core.protocol import FinishRequest
from wingbeat.core.samples import EpisodeSamples
from wingbeat.core.types import Outcome, Split, Task

NOT_DEALT = ("client:", "collected:")
"""How the ids of groups begin whose tasks no dealer dealt: their clients brought them."""


class DropReason(StrEnum):
    """Why a finished member never trains."""

    STALE = "stale"
    """A sampled token is more versions behind the trainer than ``max_staleness`` allows."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of every baseline of its group are equal, so every advantage would be 0."""
    NO_TOKENS = "no_tokens"
    """No member of its group sampled a token of this policy."""
    NO_BASELINE = "no_baseline"
    """A collected conversation has no group, and the policy's algorithm learns from a comparison within one."""
    VERSION_LEFT = "agent_version_left"
    """The version of the agent that its group belonged to left, and too few members had finished."""


class Dropped(NamedTuple):
    """One finished attempt that a policy will not train, and why."""

    episode_id: str
    attempt: int
    reason: str


class Shaping(NamedTuple):
    """What operators added to the reward of one agent in one attempt (``EpisodeSamples.shaping``)."""

    episode_id: str
    attempt: int
    policy: str
    agent: str
    value: float


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a group is, fixed at admission."""

    id: str
    task: Task
    split: Split
    size: int
    policies: tuple[str, ...]
    floor_version: Mapping[str, int] = field(default_factory=dict[str, int])
    """Per policy, the lowest version that any engine served when the group was admitted.  Versions
    only grow, so no token of the group can be older."""
    evaluation_id: str | None = None


@dataclass(frozen=True, slots=True)
class BeginRecord:
    """An attempt as it began: all that is needed to take it up again in another process."""

    episode_id: str
    attempt: int
    group_id: str
    label: str = ""
    client: str = ""
    """Whose quota it counts against."""
    code: str = ""
    """Digest of the agent's code, where its client says."""
    idempotency_key: str = ""
    """Of the request; the same one again means this attempt.  "": it has none."""
    begin_digest: str = ""
    """Of the request's body."""
    key_digest: str = ""
    """Of the key that its client was given; keys themselves are never recorded."""
    policies: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    """Policy name to pinned version, or None for the live one; the first is the default."""
    idle_timeout_s: float = 0.0
    heartbeats: bool = False
    """Its client gives signs of life: silence means that it is gone."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A finished attempt: everything that must be durable before the finish is acknowledged.

    Raises InvalidReward where a reward is not finite (a NaN in a baseline would poison its group), and
    RequestError where a metric is not.
    """

    episode_id: str
    attempt: int
    group_id: str
    outcome: Outcome
    finish_digest: str
    """Identifies the body of the finish (:func:`finish_digest`), so that a repeat is told from a contradiction."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Resolved: ``"policy"`` and, where agents differ, ``"policy:agent"`` -> reward."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    samples: tuple[EpisodeSamples, ...] = ()
    graph: bytes = b""
    """The serialised token graph, for people who inspect the episode; the dataflow never reads it."""
    label: str = ""
    message: str = ""
    cause: str = ""
    """What ended it, as a code."""
    client: str = ""
    code: str = ""
    num_turns: int = 0
    created_s: float = 0.0
    """Wall clock."""
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        sample_rewards = {f"{s.policy}:{s.agent}": s.reward for s in self.samples}
        for owner, reward in {**self.rewards, **sample_rewards}.items():
            if not math.isfinite(reward):
                raise InvalidReward(
                    f"episode {self.episode_id}: expected a finite reward for {owner!r}, got {reward}; "
                    f"finish with another outcome if the episode could not be scored",
                    param="rewards",
                )
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise RequestError(
                    f"episode {self.episode_id}: expected a finite metric {name!r}, got {value}; leave it out",
                    param="metrics",
                )

    @property
    def num_sampled(self) -> int:
        return sum(s.num_sampled for s in self.samples)


@dataclass(frozen=True, slots=True)
class MissingMember:
    """A slot of a closed group that contributed nothing."""

    episode_id: str
    attempt: int
    """The last attempt that was handed out or would have been."""
    reason: str


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """What one policy can learn from a closed group."""

    group_id: str
    policy: str
    floor_version: int
    size: int
    """Members asked for; there may be fewer."""
    members: tuple[EpisodeSamples, ...]
    task: Task = field(default_factory=lambda: Task("", ""))
    metrics: Mapping[tuple[str, int], Mapping[str, float]] = field(
        default_factory=dict[tuple[str, int], Mapping[str, float]]
    )
    """Per (episode id, attempt): what its client reported besides the reward."""


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """A group that takes no more members."""

    spec: GroupSpec
    finished: tuple[EpisodeRecord, ...]
    given_up: tuple[MissingMember, ...]
    """Slots whose attempts were used up."""
    cut_off: tuple[MissingMember, ...]
    """Slots still open when the group closed at its deadline; end their episodes."""
    is_recalled: bool = False
    """The version of the agent that worked in it left before enough members had finished: nothing of it counts, and
    its task is dealt again."""

    @property
    def drop_reason(self) -> str | None:
        """Set where no member finished, or too few, so that nothing of this group can count."""
        if self.is_recalled:
            return f"{DropReason.VERSION_LEFT}: {len(self.finished)} of {self.spec.size} episodes had finished"
        if self.finished:
            return None
        reasons = sorted({m.reason for m in (*self.given_up, *self.cut_off)})
        return f"none of {self.spec.size} episodes finished: {', '.join(reasons)}"

    def ready(self, policy: str) -> ReadyGroup | None:
        """The members' samples of one policy; None where the group holds none."""
        members = tuple(s for record in self.finished for s in record.samples if s.policy == policy)
        if not members:
            return None
        floor = self.spec.floor_version[policy]
        return ReadyGroup(
            self.spec.id,
            policy,
            floor_version=floor,
            size=self.spec.size,
            members=members,
            task=self.spec.task,
            metrics={(r.episode_id, r.attempt): r.metrics for r in self.finished},
        )


def finish_digest(request: FinishRequest) -> str:
    """Hash the validated body of a finish, independent of key order and of 1 against 1.0."""
    body = msgspec.json.encode(request.model_dump(mode="json"), order="deterministic")
    return hashlib.sha256(body).hexdigest()
