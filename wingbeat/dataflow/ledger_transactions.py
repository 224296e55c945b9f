"""The ledger's part in finishes that count on several servers or on none.

::

    prepare_finish ──▶ attempt *prepared*: payload durable, no samples yet, its group stays open
    decide         ──▶ commit: *finished*, its samples are ready;  abort: *aborted*, its payload is gone

A decision is recorded once per transaction, also by a server that prepared nothing of it (its decider); a
contrary one is refused for ever.  Within the caller's transaction or snapshot, like ``ledger_rows``.
"""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import msgspec

from wingbeat.core.errors import ConflictError, IdempotencyConflict
from wingbeat.core.types import Cause, Outcome, Split
from wingbeat.dataflow.ledger_decoding import rebase, record_of
from wingbeat.dataflow.ledger_lineages import read_ancestry
from wingbeat.dataflow.ledger_rows import check_successors, insert_samples, open_group_split
from wingbeat.dataflow.ledger_schema import AttemptState, check_attempt
from wingbeat.dataflow.ledger_views import InDoubt
from wingbeat.dataflow.records import EpisodeRecord

COMMIT, ABORT = "commit", "abort"


def is_repeated_prepare(db: sqlite3.Connection, record: EpisodeRecord, *, transaction_id: str) -> bool:
    """Whether this very finish waits for (or was committed by) this transaction.

    Raises ConflictError where the transaction is decided, or the attempt may not finish (so).
    """
    episode_id, attempt = record.episode_id, record.attempt
    row = db.execute(
        "SELECT state, finish_digest, transaction_id FROM episodes WHERE episode_id = ? AND attempt = ?",
        (episode_id, attempt),
    ).fetchone()
    if row is not None and row[0] in (AttemptState.PREPARED, AttemptState.FINISHED):
        if (row[1], row[2]) == (record.finish_digest, transaction_id):
            return True
        raise IdempotencyConflict(
            f"episode {episode_id} attempt {attempt} is {row[0]} with another body or in another transaction;"
            " a finish cannot be changed"
        )
    decided = read_decision(db, transaction_id)
    if decided is not None:
        verb = "committed" if decided else "aborted"
        raise ConflictError(f"transaction {transaction_id} is {verb} already: it takes no more finishes")
    if row is not None:
        check_attempt(episode_id, attempt, current=AttemptState(row[0]), target=AttemptState.PREPARED)
    check_successors(db, episode_id, attempt)
    return False


def decide(db: sqlite3.Connection, transaction_id: str, *, commit: bool, now: float) -> tuple[tuple[str, int], ...]:
    """Record the decision and settle what it prepared; the attempts that are in it, also on a repeat.

    Raises ConflictError for the contrary of an earlier decision.
    """
    known = read_decision(db, transaction_id)
    if known is not None and known != commit:
        said = COMMIT if known else ABORT
        raise ConflictError(f"transaction {transaction_id} was decided before: {said}; a decision cannot be changed")
    if known is None:
        db.execute("INSERT INTO transactions VALUES (?, ?, ?)", (transaction_id, COMMIT if commit else ABORT, now))
    rows = db.execute(
        "SELECT episode_id, attempt, state FROM episodes WHERE transaction_id = ? ORDER BY rowid", (transaction_id,)
    ).fetchall()
    for episode_id, attempt, state in rows:
        if state == AttemptState.PREPARED and commit:
            _commit(db, episode_id, attempt)
        elif state == AttemptState.PREPARED:
            _abort(db, episode_id, attempt, now=now)
    return tuple((episode_id, attempt) for episode_id, attempt, _ in rows)


def _commit(db: sqlite3.Connection, episode_id: str, attempt: int) -> None:
    """The finish keeps the time at which it was prepared."""
    record = read_record(db, episode_id, attempt)
    assert record is not None  # it is prepared
    split = open_group_split(db, record.group_id, episode_id=episode_id)
    db.execute("UPDATE episodes SET state = 'finished' WHERE episode_id = ? AND attempt = ?", (episode_id, attempt))
    if split is Split.TRAIN:
        (lineages,) = db.execute(
            "SELECT lineages FROM episodes WHERE episode_id = ? AND attempt = ?", (episode_id, attempt)
        ).fetchone()
        insert_samples(db, record, lineages=msgspec.json.decode(lineages, type=dict[str, int]))


def _abort(db: sqlite3.Connection, episode_id: str, attempt: int, *, now: float) -> None:
    db.execute(
        """UPDATE episodes SET state = 'aborted', outcome = ?, cause = ?, message = 'its transaction was aborted',
            finished_s = ?, payload = NULL, graph = NULL, checksum = NULL, graph_checksum = NULL
        WHERE episode_id = ? AND attempt = ?""",
        (Outcome.CLIENT, Cause.TRANSACTION_ABORTED, now, episode_id, attempt),
    )


def read_decision(db: sqlite3.Connection, transaction_id: str) -> bool | None:
    """True: commit; None: this ledger knows of no decision."""
    row = db.execute("SELECT decision FROM transactions WHERE transaction_id = ?", (transaction_id,)).fetchone()
    return None if row is None else row[0] == COMMIT


def read_record(db: sqlite3.Connection, episode_id: str, attempt: int) -> EpisodeRecord | None:
    """The finish of an attempt that is finished or prepared."""
    cursor = db.execute(
        """SELECT * FROM episodes WHERE episode_id = ? AND attempt = ? AND state IN ('finished', 'prepared')""",
        (episode_id, attempt),
    )
    cursor.row_factory = sqlite3.Row
    row = cursor.fetchone()
    return None if row is None else record_of(row)


def in_doubt(db: sqlite3.Connection) -> tuple[InDoubt, ...]:
    """Prepared finishes whose transaction is undecided, oldest first; ``db`` must give rows by name."""
    rows = db.execute("SELECT * FROM episodes WHERE transaction_id IS NOT NULL AND state = 'prepared' ORDER BY rowid")
    return tuple(
        InDoubt(row["transaction_id"], row["decider"], _rebased(db, row), prepared_s=row["finished_s"]) for row in rows
    )


def _rebased(db: sqlite3.Connection, row: sqlite3.Row) -> EpisodeRecord:
    record, lineages = record_of(row), msgspec.json.decode(row["lineages"], type=dict[str, int])
    samples = tuple(rebase(s, read_ancestry(db, s.policy), lineages[s.policy]) for s in record.samples)
    return replace(record, samples=samples)
