"""What one reads from a ledger, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wingbeat.core.types import Outcome
from wingbeat.dataflow.ledger_schema import AttemptState, BatchState, SampleState
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec
from wingbeat.dataflow.slots import RestoredSlot


@dataclass(frozen=True, slots=True)
class RunMeta:
    """Which run a ledger belongs to."""

    run_id: str
    seed: int
    config: str = "{}"
    """The run's configuration as JSON."""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group to re-open after a restart (``GroupBook.restore``)."""

    spec: GroupSpec
    slots: tuple[RestoredSlot, ...]


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """An attempt that began, as a restarted server finds it."""

    begin: BeginRecord
    state: AttemptState
    created_s: float
    """Wall clock."""
    key_digests: tuple[str, ...]
    """Of all keys that its client was given; none where an older release began it."""
    transaction_id: str = ""
    """Of a prepared one."""
    decider: str = ""
    outcome: Outcome | None = None
    """How it ended, where it has; lost ones, too."""
    cause: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A prepared finish whose transaction is not decided, as far as this ledger knows."""

    transaction_id: str
    decider: str
    """Who knows (an address), as the client said."""
    record: EpisodeRecord
    """With versions as they count now."""
    prepared_s: float
    """Wall clock."""


@dataclass(frozen=True, slots=True)
class SampleStatus:
    """What became of an attempt's samples of one policy."""

    policy: str
    state: SampleState
    reason: str | None
    num_tokens: int
    step: int | None
    """The step whose batch holds them."""
    advantages: Mapping[str, float | None]
    """Per agent, once trained; None where it was not a finite number."""


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt, for people."""

    group: GroupSpec
    state: AttemptState
    episode_id: str
    attempt: int
    label: str
    created_s: float
    record: EpisodeRecord | None
    """None unless finished."""
    samples: tuple[SampleStatus, ...]
    outcome: Outcome | None = None
    """Of an attempt that has ended, with or without a record."""
    message: str = ""
    ended_s: float | None = None
    cause: str = ""
    client: str = ""
    code: str = ""
    transaction_id: str = ""


@dataclass(frozen=True, slots=True)
class UnfinishedAttempt:
    """An attempt without a record, by name."""

    episode_id: str
    attempt: int
    state: AttemptState


@dataclass(frozen=True, slots=True)
class Checkpoint:
    policy: str
    step: int
    path: str
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class SampleCount:
    """Attempts and sampled tokens of one policy in one state."""

    policy: str
    state: SampleState
    reason: str | None
    num_attempts: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BatchCount:
    """Batches of one policy in one state."""

    policy: str
    state: BatchState
    num_batches: int
    first_step: int
    last_step: int
    num_bytes: int
    """Compressed."""


@dataclass(frozen=True, slots=True)
class LedgerSizes:
    """What a ledger takes on disk, in bytes."""

    file: int
    write_ahead_log: int
    captures: int
    """The files of captured turns."""
    samples: int
    """Of the file: the finished attempts' samples, compressed; so are the others."""
    graphs: int
    batches: int
    num_finished: int
    """Attempts whose samples and graphs these are."""


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """The whole run in counts."""

    num_tasks: int
    groups: Mapping[str, int]
    """By state."""
    attempts: Mapping[str, int]
    """By state, finished ones by ``finished:outcome``."""
    samples: tuple[SampleCount, ...]
    trained_step: Mapping[str, int]
    """Per policy, the last step that was trained and survives."""
    num_evaluations: int
