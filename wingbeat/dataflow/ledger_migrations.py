"""Creating a ledger's tables, and lifting what an older release wrote.

Every migration holds the statements of its own time: those of :mod:`ledger_schema` go on changing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping

from wingbeat.core.errors import SetupError
from wingbeat.dataflow.ledger_integrity import checksum, damaged_row, seal, teach
from wingbeat.dataflow.ledger_rows import set_meta
from wingbeat.dataflow.ledger_schema import SCHEMA_VERSION, TABLES

Migration = Callable[[sqlite3.Connection], None]


_BATCHES_2 = """CREATE TABLE batches (
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
    UNIQUE (policy, lineage, step))"""

_SAMPLES_2 = """CREATE TABLE samples (
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
    FOREIGN KEY (episode_id, attempt) REFERENCES episodes) WITHOUT ROWID"""

_NEW_IN_2 = (
    "CREATE INDEX samples_waiting ON samples (policy) WHERE state = 'finished'",
    "CREATE INDEX samples_by_batch ON samples (batch_id) WHERE batch_id IS NOT NULL",
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
    "ALTER TABLE checkpoints ADD COLUMN lineage INTEGER NOT NULL DEFAULT 0",
)

_NEW_IN_3 = (
    *(
        f"ALTER TABLE episodes ADD COLUMN {column}"
        for column in (
            "cause TEXT NOT NULL DEFAULT ''",
            "client TEXT NOT NULL DEFAULT ''",
            "code TEXT NOT NULL DEFAULT ''",
            "idempotency_key TEXT",
            "begin_digest TEXT",
            "key_digests TEXT",
            "begin_policies TEXT",
            "idle_timeout_s REAL",
            "heartbeats INTEGER NOT NULL DEFAULT 0",
            "transaction_id TEXT",
            "decider TEXT",
            "lineages TEXT",
            "checksum INTEGER",
            "graph_checksum INTEGER",
        )
    ),
    *(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER" for table in ("meta", "groups", "lineages", "samples")),
    "ALTER TABLE batches ADD COLUMN weights_checksum TEXT NOT NULL DEFAULT ''",
    "CREATE INDEX episodes_begun ON episodes (idempotency_key) WHERE idempotency_key IS NOT NULL",
    "CREATE INDEX episodes_in_transactions ON episodes (transaction_id) WHERE transaction_id IS NOT NULL",
    """CREATE TABLE transactions (
        transaction_id TEXT PRIMARY KEY,
        decision TEXT NOT NULL,
        decided_s REAL NOT NULL) WITHOUT ROWID""",
)


def _add_lineages(db: sqlite3.Connection) -> None:
    """1 to 2: lineages; which attempts a batch holds; shaping and masked tokens of a sample.

    SQLite cannot change a table's UNIQUE, so the batches move to a new table (foreign keys are off meanwhile).
    """
    db.execute("ALTER TABLE batches RENAME TO batches_1")
    db.execute(_BATCHES_2)
    columns = (
        "batch_id, policy, step, group_ids, seed, state, metrics, advantages, logged_s, trained_s, digest, payload"
    )
    db.execute(f"INSERT INTO batches ({columns}) SELECT {columns} FROM batches_1")
    db.execute("ALTER TABLE samples RENAME TO samples_1")
    db.execute(_SAMPLES_2)
    columns = "episode_id, attempt, policy, state, reason, batch_id, num_tokens"
    db.execute(f"INSERT INTO samples ({columns}) SELECT {columns} FROM samples_1")
    db.execute("UPDATE samples SET batch_id = NULL WHERE state IN ('finished', 'dropped')")
    db.execute("DROP TABLE samples_1")  # with its indexes
    db.execute("DROP TABLE batches_1")
    for statement in _NEW_IN_2:
        db.execute(statement)
    db.execute(
        """INSERT INTO members SELECT batch_id, episode_id, attempt, 0 FROM samples
        WHERE state IN ('batched', 'trained')"""
    )


def _add_swarm(db: sqlite3.Connection) -> None:
    """2 to 3: who began an attempt and how, so that it survives a restart; transactions; checksums of rows.

    Rows get theirs now, except finished attempts: to read all their payloads would take minutes in a large ledger.
    What ran cannot be taken up: nobody recorded how it began.
    """
    for statement in _NEW_IN_3:
        db.execute(statement)
    db.execute(
        """UPDATE episodes SET state = 'interrupted', outcome = 'infrastructure', cause = 'server_restart',
            message = 'the server stopped' WHERE state = 'running'"""
    )
    teach(db)
    for table in ("meta", "groups", "lineages", "samples"):
        seal(db, table)


MIGRATIONS: Mapping[int, Migration] = {1: _add_lineages, 2: _add_swarm}
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
        row = connection.execute("SELECT * FROM meta WHERE key = 'schema_version'").fetchone()
    if row is None:
        raise SetupError(f"expected a Wingbeat ledger, got a database with the tables {', '.join(sorted(tables))}")
    key, value, *seal_of = row
    if seal_of and seal_of[0] not in (None, checksum(key, value)):
        raise damaged_row("meta", "the schema version")
    return int(value)


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
            for statement in TABLES:
                connection.execute(statement)
            version = SCHEMA_VERSION
        while version < latest:
            migrations[version](connection)
            version += 1
        set_meta(connection, "schema_version", str(version))
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
