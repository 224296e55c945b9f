"""The ledger's rows of attempts: their begins, what a restart finds of them, and interruptions.

Like ``ledger_rows``: within the caller's transaction or snapshot.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from wingbeat.core.errors import ConflictError, EpisodeClosed, NotFoundError
from wingbeat.core.types import Outcome
from wingbeat.dataflow.ledger_integrity import member_of
from wingbeat.dataflow.ledger_rows import attempt_row, open_group_split, to_json
from wingbeat.dataflow.ledger_schema import AttemptState, check_attempt
from wingbeat.dataflow.ledger_views import RunningAttempt
from wingbeat.dataflow.records import BeginRecord

COLUMNS = """episode_id, attempt, group_id, label, client, code, idempotency_key, begin_digest, key_digests,
    begin_policies, idle_timeout_s, heartbeats, state, created_s, transaction_id, decider, outcome, cause, message"""
"""Not the tokens, which may be megabytes: control asks on its event loop, also for strangers with wrong keys."""
OPEN_STATES = (AttemptState.RUNNING, AttemptState.LOST, AttemptState.PREPARED)


def insert_begin(db: sqlite3.Connection, begin: BeginRecord, *, now: float) -> None:
    """Raises EpisodeClosed where the group has closed.

    ConflictError where it, or a later attempt, had begun before, or a prepared one may yet count.
    """
    episode_id, attempt = begin.episode_id, begin.attempt
    open_group_split(db, begin.group_id, episode_id=episode_id)
    newest = db.execute(
        "SELECT attempt, state FROM episodes WHERE episode_id = ? ORDER BY attempt DESC LIMIT 1", (episode_id,)
    ).fetchone()
    if newest is not None and newest[0] >= attempt:
        raise ConflictError(f"episode {episode_id}: attempt {newest[0]} has begun, {attempt} cannot begin after it")
    if newest is not None and newest[1] == AttemptState.PREPARED:
        raise ConflictError(
            f"episode {episode_id}: attempt {newest[0]} waits for its transaction, {attempt} cannot begin before"
        )
    db.execute(
        """INSERT INTO episodes (episode_id, attempt, group_id, label, state, created_s, client, code,
            idempotency_key, begin_digest, key_digests, begin_policies, idle_timeout_s, heartbeats)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            episode_id,
            attempt,
            begin.group_id,
            begin.label,
            AttemptState.RUNNING,
            now,
            begin.client,
            begin.code,
            begin.idempotency_key or None,
            begin.begin_digest or None,
            to_json([begin.key_digest] if begin.key_digest else []),
            msgspec.json.encode(begin.policies).decode(),  # in their order: the first is the default
            begin.idle_timeout_s,
            begin.heartbeats,
        ),
    )


def add_key(db: sqlite3.Connection, episode_id: str, attempt: int, *, key_digest: str) -> None:
    """Another key of an attempt that may still finish.  Raises NotFoundError or EpisodeClosed."""
    row = db.execute(
        "SELECT state, key_digests FROM episodes WHERE episode_id = ? AND attempt = ?", (episode_id, attempt)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"episode {episode_id} attempt {attempt} was never recorded; record_begin first")
    if row[0] not in OPEN_STATES:
        raise EpisodeClosed(f"episode {episode_id} attempt {attempt} is {row[0]}: it takes no more keys")
    keys = [*msgspec.json.decode(row[1] or "[]", type=list[str]), key_digest]
    db.execute(
        "UPDATE episodes SET key_digests = ? WHERE episode_id = ? AND attempt = ?",
        (to_json(list(dict.fromkeys(keys))), episode_id, attempt),
    )


@dataclass(frozen=True, slots=True)
class EndRow:
    """How an attempt ended without a finish."""

    state: AttemptState
    outcome: Outcome
    cause: str
    message: str
    ended_s: float


def end_attempt(db: sqlite3.Connection, episode_id: str, attempt: int, end: EndRow) -> None:
    """Raises NotFoundError, or EpisodeClosed where the attempt ended before."""
    row = attempt_row(db, episode_id, attempt)
    if row is None:
        raise NotFoundError(f"episode {episode_id} attempt {attempt} was never recorded; record_begin first")
    if row[0] is AttemptState.PREPARED:
        raise EpisodeClosed(f"episode {episode_id} attempt {attempt} is prepared: only its transaction may end it")
    check_attempt(episode_id, attempt, current=row[0], target=end.state)
    db.execute(
        """UPDATE episodes SET state = ?, outcome = ?, cause = ?, message = ?, finished_s = ?
        WHERE episode_id = ? AND attempt = ?""",
        (end.state, end.outcome, end.cause, end.message, end.ended_s, episode_id, attempt),
    )


def interrupt_running(db: sqlite3.Connection, *, keep: Collection[tuple[str, int]], cause: str, now: float) -> int:
    """End the running attempts that nobody took up again; how many there were."""
    running = db.execute("SELECT episode_id, attempt FROM episodes WHERE state = 'running'").fetchall()
    ended = [(episode_id, attempt) for episode_id, attempt in running if (episode_id, attempt) not in keep]
    end = EndRow(AttemptState.INTERRUPTED, Outcome.INFRASTRUCTURE, cause, "the server stopped", now)
    for episode_id, attempt in ended:
        end_attempt(db, episode_id, attempt, end)
    return len(ended)


def running_attempts(db: sqlite3.Connection) -> tuple[RunningAttempt, ...]:
    """Of open groups, in order of their beginning: the newest attempt of an episode, where it may still finish."""
    rows = db.execute(
        f"""SELECT {COLUMNS} FROM episodes e WHERE state IN ({", ".join("?" * len(OPEN_STATES))})
        AND group_id IN (SELECT group_id FROM groups WHERE state = 'open')
        AND attempt = (SELECT MAX(attempt) FROM episodes n WHERE n.episode_id = e.episode_id) ORDER BY e.rowid""",
        OPEN_STATES,
    )
    return tuple(_attempt(row) for row in rows)


def attempts_begun(db: sqlite3.Connection, episode_id: str) -> tuple[RunningAttempt, ...]:
    """All attempts of an episode, whatever became of them, the first one first."""
    rows = db.execute(f"SELECT {COLUMNS} FROM episodes WHERE episode_id = ? ORDER BY attempt", (episode_id,))
    return tuple(_attempt(row) for row in rows)


def _attempt(row: sqlite3.Row) -> RunningAttempt:
    keys = msgspec.json.decode(row["key_digests"] or "[]", type=tuple[str, ...])
    return RunningAttempt(
        _begin(row, key_digest=keys[-1] if keys else ""),
        member_of(AttemptState, row["state"], where="a row of table episodes"),
        created_s=row["created_s"],
        key_digests=keys,
        transaction_id=row["transaction_id"] or "",
        decider=row["decider"] or "",
        outcome=None if row["outcome"] is None else member_of(Outcome, row["outcome"], where="a row of table episodes"),
        cause=row["cause"],
        message=row["message"],
    )


def begun(db: sqlite3.Connection, idempotency_key: str) -> RunningAttempt | None:
    """The newest attempt that a request of this idempotency key began."""
    row = db.execute(
        f"SELECT {COLUMNS} FROM episodes WHERE idempotency_key = ? ORDER BY rowid DESC LIMIT 1", (idempotency_key,)
    ).fetchone()
    return None if row is None else _attempt(row)


def _begin(row: sqlite3.Row, *, key_digest: str) -> BeginRecord:
    return BeginRecord(
        episode_id=row["episode_id"],
        attempt=row["attempt"],
        group_id=row["group_id"],
        label=row["label"],
        client=row["client"],
        code=row["code"],
        idempotency_key=row["idempotency_key"] or "",
        begin_digest=row["begin_digest"] or "",
        key_digest=key_digest,
        policies=msgspec.json.decode(row["begin_policies"] or "{}", type=dict[str, int | None]),
        idle_timeout_s=row["idle_timeout_s"] or 0.0,
        heartbeats=bool(row["heartbeats"]),
    )
