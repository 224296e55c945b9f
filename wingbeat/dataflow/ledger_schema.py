"""The ledger's tables and states.

::

    attempt   running ──▶ finished              a lost attempt may finish late; what a restart interrupted
                 ├──▶ lost ──▶ finished         may not, its tokens are gone
                 ├──▶ aborted
                 ├──▶ interrupted
                 └──▶ prepared ──▶ finished     a finish that counts on several servers or on none (also of a
                          └──▶ aborted          lost attempt); it waits for its transaction's decision
    sample    finished ──▶ batched ──▶ trained      per (attempt, policy)
                 │ ▲          │            │
                 │ └──────────┴────────────┘        a rollback abandons their step
                 └──▶ dropped(reason)
    batch     logged ──▶ trained
                 └──────────┴──▶ abandoned          by a rollback
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from wingbeat.core.errors import ConflictError, EpisodeClosed

SCHEMA_VERSION = 3


class AttemptState(StrEnum):
    """Where an attempt stands."""

    RUNNING = "running"
    FINISHED = "finished"
    LOST = "lost"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"
    """The server stopped while it ran, and it could not be taken up again."""
    PREPARED = "prepared"
    """Its finish is durable and waits for its transaction."""


class SampleState(StrEnum):
    """Where an attempt's samples of one policy stand."""

    FINISHED = "finished"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


class BatchState(StrEnum):
    """Where a batch stands: logged before its step, trained after it."""

    LOGGED = "logged"
    TRAINED = "trained"
    ABANDONED = "abandoned"
    """Its step is on no surviving lineage."""


ATTEMPT_TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.RUNNING: frozenset(
        {
            AttemptState.FINISHED,
            AttemptState.LOST,
            AttemptState.ABORTED,
            AttemptState.INTERRUPTED,
            AttemptState.PREPARED,
        }
    ),
    AttemptState.LOST: frozenset({AttemptState.FINISHED, AttemptState.PREPARED}),
    AttemptState.PREPARED: frozenset({AttemptState.FINISHED, AttemptState.ABORTED}),
    AttemptState.FINISHED: frozenset(),
    AttemptState.ABORTED: frozenset(),
    AttemptState.INTERRUPTED: frozenset(),
}

SAMPLE_TRANSITIONS: Mapping[SampleState, frozenset[SampleState]] = {
    SampleState.FINISHED: frozenset({SampleState.BATCHED, SampleState.DROPPED}),
    SampleState.BATCHED: frozenset({SampleState.TRAINED}),
    SampleState.TRAINED: frozenset(),
    SampleState.DROPPED: frozenset(),
}
"""In the course of training."""

ROLLBACK_TRANSITIONS: Mapping[SampleState, frozenset[SampleState]] = {
    SampleState.FINISHED: frozenset({SampleState.TRAINED}),
    SampleState.BATCHED: frozenset({SampleState.FINISHED, SampleState.TRAINED, SampleState.DROPPED}),
    SampleState.TRAINED: frozenset({SampleState.FINISHED, SampleState.DROPPED}),
    SampleState.DROPPED: frozenset({SampleState.TRAINED}),
}
"""Where a lineage begins: back to the buffer (what was erased is dropped), or (a trainer that returned with steps that
were abandoned before) into what its checkpoint holds."""

ERASED = "erased"
"""The reason of samples whose text is gone, whatever their state: they never train again."""


def check_attempt(episode_id: str, attempt: int, *, current: AttemptState, target: AttemptState) -> None:
    """Raises EpisodeClosed where an attempt may not go from ``current`` to ``target``."""
    if target not in ATTEMPT_TRANSITIONS[current]:
        raise EpisodeClosed(f"episode {episode_id} attempt {attempt} is {current}: it cannot become {target}")


def check_sample(episode_id: str, attempt: int, *, current: SampleState, target: SampleState) -> None:
    """Raises ConflictError where an attempt's samples may not go from ``current`` to ``target``."""
    if target not in SAMPLE_TRANSITIONS[current]:
        raise ConflictError(
            f"samples of episode {episode_id} attempt {attempt} are {current}: they cannot become {target}"
        )


def check_rollback(episode_id: str, attempt: int, *, current: SampleState, target: SampleState) -> None:
    """Raises ConflictError where a rollback may not take an attempt's samples from ``current`` to ``target``."""
    if target not in ROLLBACK_TRANSITIONS[current]:
        raise ConflictError(
            f"samples of episode {episode_id} attempt {attempt} are {current}: no rollback makes them {target}"
        )


TABLES = (
    # checksum columns: CRC-32 of the row's content (ledger_integrity), NULL where an older release wrote it
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER) WITHOUT ROWID",
    """CREATE TABLE tasks (
        task_key INTEGER PRIMARY KEY,
        source TEXT NOT NULL,
        id TEXT NOT NULL,
        payload TEXT NOT NULL,
        UNIQUE (source, id, payload))""",
    """CREATE TABLE groups (
        group_key INTEGER PRIMARY KEY,
        group_id TEXT NOT NULL UNIQUE,
        task_key INTEGER NOT NULL REFERENCES tasks,
        split TEXT NOT NULL,
        size INTEGER NOT NULL,
        policies TEXT NOT NULL,
        floor_version TEXT NOT NULL,
        evaluation_id TEXT,
        episode_ids TEXT NOT NULL,
        state TEXT NOT NULL,
        reason TEXT,
        opened_s REAL NOT NULL,
        closed_s REAL,
        checksum INTEGER)""",
    "CREATE INDEX groups_open ON groups (state) WHERE state = 'open'",
    """CREATE TABLE episodes (
        episode_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        group_id TEXT NOT NULL REFERENCES groups (group_id),
        label TEXT NOT NULL,
        state TEXT NOT NULL,
        outcome TEXT,
        message TEXT NOT NULL DEFAULT '',
        rewards TEXT,
        metrics TEXT,
        num_turns INTEGER NOT NULL DEFAULT 0,
        num_sampled INTEGER NOT NULL DEFAULT 0,
        created_s REAL NOT NULL,
        finished_s REAL,
        finish_digest TEXT,
        payload BLOB,
        graph BLOB,
        cause TEXT NOT NULL DEFAULT '',
        client TEXT NOT NULL DEFAULT '',
        code TEXT NOT NULL DEFAULT '',
        idempotency_key TEXT,
        begin_digest TEXT,
        key_digests TEXT,
        begin_policies TEXT,
        idle_timeout_s REAL,
        heartbeats INTEGER NOT NULL DEFAULT 0,
        transaction_id TEXT,
        decider TEXT,
        lineages TEXT,
        checksum INTEGER,
        graph_checksum INTEGER,
        PRIMARY KEY (episode_id, attempt))""",
    "CREATE INDEX episodes_by_group ON episodes (group_id)",
    "CREATE INDEX episodes_running ON episodes (state) WHERE state = 'running'",
    "CREATE INDEX episodes_begun ON episodes (idempotency_key) WHERE idempotency_key IS NOT NULL",
    "CREATE INDEX episodes_in_transactions ON episodes (transaction_id) WHERE transaction_id IS NOT NULL",
    """CREATE TABLE transactions (
        transaction_id TEXT PRIMARY KEY,
        decision TEXT NOT NULL,
        decided_s REAL NOT NULL) WITHOUT ROWID""",
    # Exactly one attempt of an episode ever counts.
    "CREATE UNIQUE INDEX episodes_counted ON episodes (episode_id) WHERE state = 'finished' AND outcome = 'agent'",
    """CREATE TABLE batches (
        batch_id TEXT PRIMARY KEY,
        policy TEXT NOT NULL,
        step INTEGER NOT NULL,
        group_ids TEXT NOT NULL,
        seed INTEGER NOT NULL,
        state TEXT NOT NULL,
        metrics TEXT,
        advantages TEXT,
        logged_s REAL NOT NULL,
        trained_s REAL,
        digest TEXT NOT NULL,
        payload BLOB NOT NULL,
        lineage INTEGER NOT NULL DEFAULT 0,
        weights_checksum TEXT NOT NULL DEFAULT '',
        UNIQUE (policy, lineage, step))""",
    """CREATE TABLE members (
        batch_id TEXT NOT NULL REFERENCES batches,
        episode_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        replayed INTEGER NOT NULL,
        PRIMARY KEY (batch_id, episode_id, attempt)) WITHOUT ROWID""",
    """CREATE TABLE lineages (
        policy TEXT NOT NULL,
        lineage INTEGER NOT NULL,
        base_lineage INTEGER NOT NULL,
        base_step INTEGER NOT NULL,
        reason TEXT NOT NULL,
        began_s REAL NOT NULL,
        checksum INTEGER,
        PRIMARY KEY (policy, lineage)) WITHOUT ROWID""",
    # lineage: of the policy when the attempt finished, to which the versions in its payload belong
    # shaping: what operators added to the reward, per agent; masked: tokens too old to train when batched
    """CREATE TABLE samples (
        episode_id TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        policy TEXT NOT NULL,
        state TEXT NOT NULL,
        reason TEXT,
        batch_id TEXT REFERENCES batches,
        num_tokens INTEGER NOT NULL,
        lineage INTEGER NOT NULL DEFAULT 0,
        shaping TEXT,
        masked INTEGER NOT NULL DEFAULT 0,
        checksum INTEGER,
        PRIMARY KEY (episode_id, attempt, policy),
        FOREIGN KEY (episode_id, attempt) REFERENCES episodes) WITHOUT ROWID""",
    "CREATE INDEX samples_waiting ON samples (policy) WHERE state = 'finished'",
    "CREATE INDEX samples_by_batch ON samples (batch_id) WHERE batch_id IS NOT NULL",
    """CREATE TABLE evaluations (
        evaluation_id TEXT PRIMARY KEY,
        policy TEXT NOT NULL,
        version INTEGER NOT NULL,
        done INTEGER NOT NULL,
        result TEXT NOT NULL,
        recorded_s REAL NOT NULL)""",
    """CREATE TABLE checkpoints (
        policy TEXT NOT NULL,
        step INTEGER NOT NULL,
        path TEXT NOT NULL,
        recorded_s REAL NOT NULL,
        lineage INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (policy, step)) WITHOUT ROWID""",
)
