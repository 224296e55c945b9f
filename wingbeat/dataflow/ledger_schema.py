"""The ledger's tables, states and schema versions.

::

    attempt   running ──▶ finished          a lost attempt may finish late; what a restart interrupted
                 ├──▶ lost ──▶ finished     may not, its tokens are gone
                 ├──▶ aborted
                 └──▶ interrupted
    sample    finished ──▶ batched ──▶ trained      per (attempt, policy)
                 │ ▲          │            │
                 │ └──────────┴────────────┘        a rollback abandons their step
                 └──▶ dropped(reason)
    batch     logged ──▶ trained
                 └──────────┴──▶ abandoned          by a rollback
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from enum import StrEnum

from wingbeat.core.errors import ConflictError, EpisodeClosed, SetupError

SCHEMA_VERSION = 2


class AttemptState(StrEnum):
    """Where an attempt stands."""

    RUNNING = "running"
    FINISHED = "finished"
    LOST = "lost"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"
    """The server stopped while it ran."""


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
        {AttemptState.FINISHED, AttemptState.LOST, AttemptState.ABORTED, AttemptState.INTERRUPTED}
    ),
    AttemptState.LOST: frozenset({AttemptState.FINISHED}),
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
    SampleState.BATCHED: frozenset({SampleState.FINISHED, SampleState.TRAINED}),
    SampleState.TRAINED: frozenset({SampleState.FINISHED}),
    SampleState.DROPPED: frozenset({SampleState.TRAINED}),
}
"""Where a lineage begins: back to the buffer, or (a trainer that returned with steps that were abandoned before)
into what its checkpoint holds."""


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


_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
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
        closed_s REAL)""",
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
        PRIMARY KEY (episode_id, attempt))""",
    "CREATE INDEX episodes_by_group ON episodes (group_id)",
    "CREATE INDEX episodes_running ON episodes (state) WHERE state = 'running'",
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

Migration = Callable[[sqlite3.Connection], None]


def _add_lineages(db: sqlite3.Connection) -> None:
    """1 to 2: lineages; which attempts a batch holds; shaping and masked tokens of a sample.

    SQLite cannot change a table's UNIQUE, so the batches move to a new table (foreign keys are off meanwhile).
    """
    tables = {statement.split()[2]: statement for statement in _TABLES if statement.startswith("CREATE TABLE")}
    db.execute("ALTER TABLE batches RENAME TO batches_1")
    db.execute(tables["batches"])
    columns = (
        "batch_id, policy, step, group_ids, seed, state, metrics, advantages, logged_s, trained_s, digest, payload"
    )
    db.execute(f"INSERT INTO batches ({columns}) SELECT {columns} FROM batches_1")
    db.execute("ALTER TABLE samples RENAME TO samples_1")
    db.execute(tables["samples"])
    columns = "episode_id, attempt, policy, state, reason, batch_id, num_tokens"
    db.execute(f"INSERT INTO samples ({columns}) SELECT {columns} FROM samples_1")
    db.execute("UPDATE samples SET batch_id = NULL WHERE state IN ('finished', 'dropped')")
    db.execute("DROP TABLE samples_1")  # with its indexes
    db.execute("DROP TABLE batches_1")
    for statement in _TABLES:
        if " ON samples " in statement:
            db.execute(statement)
    db.execute(tables["members"])
    db.execute(tables["lineages"])
    db.execute(
        """INSERT INTO members SELECT batch_id, episode_id, attempt, 0 FROM samples
        WHERE state IN ('batched', 'trained')"""
    )
    db.execute("ALTER TABLE checkpoints ADD COLUMN lineage INTEGER NOT NULL DEFAULT 0")


MIGRATIONS: Mapping[int, Migration] = {1: _add_lineages}
"""Schema version -> what lifts a ledger from it to the next one; each runs in the transaction of all."""


def schema_version(connection: sqlite3.Connection) -> int:
    """The version of an open ledger; 0 for an empty file.  Raises SetupError where it is no ledger."""
    try:
        tables = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        raise SetupError(f"expected a Wingbeat ledger, got a file that SQLite cannot read: {error}") from error
    if not tables:
        return 0
    row = None
    if "meta" in tables:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if row is None:
        raise SetupError(f"expected a Wingbeat ledger, got a database with the tables {', '.join(sorted(tables))}")
    return int(row[0])


def check_version(version: int, *, latest: int = SCHEMA_VERSION) -> None:
    """Raises SetupError for a ledger that a newer Wingbeat wrote."""
    if version > latest:
        raise SetupError(
            f"this ledger has schema version {version}, this Wingbeat reads up to {latest}; "
            f"upgrade Wingbeat or start a new run directory"
        )


def migrate(
    connection: sqlite3.Connection,
    *,
    latest: int = SCHEMA_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> None:
    """Create the tables of an empty file, or lift an older ledger to ``latest``; all or nothing.

    Foreign keys must be off.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = schema_version(connection)
        check_version(version, latest=latest)
        if version == 0:
            for statement in _TABLES:
                connection.execute(statement)
            version = SCHEMA_VERSION
        while version < latest:
            migrations[version](connection)
            version += 1
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(version),))
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
