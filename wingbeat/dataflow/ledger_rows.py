"""The ledger's rows: single steps of its transactions, each on the writer's connection.

None commits; whoever calls them owns the transaction.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from wingbeat.core.errors import ConflictError, EpisodeClosed, IdempotencyConflict, NotFoundError
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.ledger_integrity import checksum, row_checksum, seal
from wingbeat.dataflow.ledger_schema import AttemptState, SampleState, check_attempt, check_sample
from wingbeat.dataflow.operators import counts_in_group
from wingbeat.dataflow.records import Dropped, EpisodeRecord, GroupSpec, Shaping

OPERATORS = "operators/"
"""Before a policy's name: the key of its chain's state."""

HALTS = "halted/"
"""Before a policy's name: the key of why its training ended."""

_json_encoder = msgspec.json.Encoder(order="deterministic")


def to_json(value: Any) -> str:
    """Equal values give equal texts."""
    return _json_encoder.encode(value).decode()


def set_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, value, checksum(key, value)))


def insert_group(db: sqlite3.Connection, spec: GroupSpec, *, episode_ids: Sequence[str], now: float) -> None:
    task = (spec.task.source, spec.task.id, to_json(spec.task.payload))
    db.execute("INSERT OR IGNORE INTO tasks (source, id, payload) VALUES (?, ?, ?)", task)
    (task_key,) = db.execute("SELECT task_key FROM tasks WHERE source = ? AND id = ? AND payload = ?", task).fetchone()
    lists = (to_json(spec.policies), to_json(dict(spec.floor_version)), spec.evaluation_id, to_json(list(episode_ids)))
    db.execute(
        """INSERT INTO groups (group_id, task_key, split, size, policies, floor_version, evaluation_id, episode_ids,
            state, opened_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'open', ?)""",
        (spec.id, task_key, spec.split, spec.size, *lists, now),
    )
    seal(db, "groups", "group_id = ?", (spec.id,))


def save_operators(db: sqlite3.Connection, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the chains' states, policy by policy; those not named stay."""
    for policy, state in states.items():
        set_meta(db, f"{OPERATORS}{policy}", to_json(dict(state)))


def group_row(db: sqlite3.Connection, group_id: str) -> tuple[Split, str]:
    """Split and state.  Raises NotFoundError."""
    row = db.execute("SELECT split, state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"group {group_id} is not recorded; record_group comes first")
    return Split(row[0]), str(row[1])


def open_group_split(db: sqlite3.Connection, group_id: str, *, episode_id: str) -> Split:
    """The split of a group that an episode may still count in.  Raises NotFoundError or EpisodeClosed."""
    split, state = group_row(db, group_id)
    if state != "open":
        raise EpisodeClosed(f"episode {episode_id}: its group {group_id} has closed")
    return split


def close_open_group(db: sqlite3.Connection, group_id: str, *, reason: str | None, now: float) -> bool:
    """False: it was closed before.  Attempts that still run in it end.  Raises ConflictError for a prepared member."""
    group_row(db, group_id)
    prepared = db.execute(
        "SELECT episode_id, transaction_id FROM episodes WHERE group_id = ? AND state = 'prepared'", (group_id,)
    ).fetchone()
    if prepared is not None:
        raise ConflictError(
            f"group {group_id} cannot close: episode {prepared[0]} waits for transaction {prepared[1]}; decide it"
        )
    update = "UPDATE groups SET state = 'closed', reason = ?, closed_s = ? WHERE group_id = ? AND state = 'open'"
    if not db.execute(update, (reason, now, group_id)).rowcount:
        return False
    db.execute(
        """UPDATE episodes SET state = ?, outcome = ?, message = 'its group closed', finished_s = ?
        WHERE group_id = ? AND state = 'running'""",
        (AttemptState.INTERRUPTED, Outcome.INFRASTRUCTURE, now, group_id),
    )
    return True


def attempt_row(db: sqlite3.Connection, episode_id: str, attempt: int) -> tuple[AttemptState, str | None] | None:
    """State and finish digest; None where the attempt is not recorded."""
    row = db.execute(
        "SELECT state, finish_digest FROM episodes WHERE episode_id = ? AND attempt = ?", (episode_id, attempt)
    ).fetchone()
    return None if row is None else (AttemptState(row[0]), row[1])


def is_repeated_finish(db: sqlite3.Connection, record: EpisodeRecord) -> bool:
    """Whether this very finish is recorded.  Raises ConflictError where the attempt may not finish (so)."""
    episode_id, attempt = record.episode_id, record.attempt
    row = attempt_row(db, episode_id, attempt)
    if row is not None:
        state, digest = row
        if state is AttemptState.FINISHED and digest == record.finish_digest:
            return True
        if state is AttemptState.FINISHED:
            raise IdempotencyConflict(
                f"episode {episode_id} attempt {attempt} finished with another body; a finish cannot be changed"
            )
        if state is AttemptState.PREPARED:
            raise EpisodeClosed(f"episode {episode_id} attempt {attempt} is prepared: it waits for its transaction")
        check_attempt(episode_id, attempt, current=state, target=AttemptState.FINISHED)
    check_successors(db, episode_id, attempt)
    return False


def check_successors(db: sqlite3.Connection, episode_id: str, attempt: int) -> None:
    """Raises ConflictError where another attempt of the episode counts, or a later one has begun."""
    other = db.execute(
        """SELECT attempt, state FROM episodes WHERE episode_id = ?
        AND (attempt > ? OR (attempt < ? AND state = 'finished' AND outcome = 'agent'))""",
        (episode_id, attempt, attempt),
    ).fetchone()
    if other is not None:
        raise ConflictError(f"episode {episode_id} attempt {attempt} cannot count: attempt {other[0]} is {other[1]}")


@dataclass(frozen=True, slots=True)
class FinishRow:
    """A finish as it is stored; ``transaction_id`` and ``decider`` where it waits for a decision."""

    record: EpisodeRecord
    payload: bytes
    graph: bytes | None
    transaction_id: str | None = None
    decider: str | None = None


def write_finish(db: sqlite3.Connection, finish: FinishRow) -> None:
    """Insert or complete an attempt's row: *finished*, or *prepared* where a transaction is named."""
    record = finish.record
    values: dict[str, Any] = {
        "episode_id": record.episode_id,
        "attempt": record.attempt,
        "group_id": record.group_id,
        "label": record.label,
        "client": record.client,
        "code": record.code,
        "state": AttemptState.FINISHED if finish.transaction_id is None else AttemptState.PREPARED,
        "outcome": record.outcome,
        "cause": record.cause,
        "message": record.message,
        "rewards": to_json(dict(record.rewards)),
        "metrics": to_json(dict(record.metrics)),
        "num_turns": record.num_turns,
        "num_sampled": record.num_sampled,
        "created_s": record.created_s,
        "finished_s": record.finished_s,
        "finish_digest": record.finish_digest,
        "payload": finish.payload,
        "graph": finish.graph,
        "graph_checksum": None if finish.graph is None else checksum(finish.graph),
        "transaction_id": finish.transaction_id,
        "decider": finish.decider,
        "lineages": to_json(current_lineages(db, record)),
    }
    values["checksum"] = row_checksum("episodes", values)
    kept = ("episode_id", "attempt", "group_id", "label", "client", "code")
    updates = ", ".join(f"{column} = excluded.{column}" for column in values if column not in kept)
    db.execute(
        f"""INSERT INTO episodes ({", ".join(values)}) VALUES ({", ".join("?" * len(values))})
        ON CONFLICT (episode_id, attempt) DO UPDATE SET {updates}""",
        tuple(values.values()),
    )


def current_lineages(db: sqlite3.Connection, record: EpisodeRecord) -> dict[str, int]:
    """Per policy of its samples the newest lineage: the one to which their versions belong when it finishes."""
    return {samples.policy: newest_lineage(db, samples.policy)[0] for samples in record.samples}


def insert_samples(db: sqlite3.Connection, record: EpisodeRecord, *, lineages: Mapping[str, int] | None = None) -> None:
    """``lineages``: of the policies when the attempt finished, where that was not just now."""
    counted = counts_in_group(record)
    state, reason = (SampleState.FINISHED, None) if counted else (SampleState.DROPPED, f"outcome_{record.outcome}")
    known = current_lineages(db, record) if lineages is None else lineages
    tokens: Counter[str] = Counter()
    for samples in record.samples:
        tokens[samples.policy] += samples.num_sampled
    db.executemany(
        """INSERT INTO samples (episode_id, attempt, policy, state, reason, num_tokens, lineage)
        VALUES (?, ?, ?, ?, ?, ?, ?)""",
        [
            (record.episode_id, record.attempt, policy, state, reason, count, known[policy])
            for policy, count in tokens.items()
        ],
    )
    seal(db, "samples", "episode_id = ? AND attempt = ?", (record.episode_id, record.attempt))


def shape_samples(db: sqlite3.Connection, shaping: Sequence[Shaping]) -> None:
    """Store what operators added to rewards; what is given for one agent twice adds up."""
    totals: dict[tuple[str, int, str], dict[str, float]] = {}
    for entry in shaping:
        agents = totals.setdefault((entry.episode_id, entry.attempt, entry.policy), {})
        agents[entry.agent] = agents.get(entry.agent, 0.0) + entry.value
    for key, agents in totals.items():
        update = "UPDATE samples SET shaping = ? WHERE episode_id = ? AND attempt = ? AND policy = ?"
        if not db.execute(update, (to_json(agents), *key)).rowcount:
            raise NotFoundError(f"episode {key[0]} attempt {key[1]} has no finished samples of policy {key[2]!r}")
        seal(db, "samples", "episode_id = ? AND attempt = ? AND policy = ?", key)


def insert_members(db: sqlite3.Connection, batch: TrainingBatch) -> None:
    """Its finished members become batched; replayed ones, which an earlier batch trained, stay as they are."""
    replayed, masked = set(batch.replayed), Counter[tuple[str, int]]()
    for episode in batch.episodes:
        masked[episode.episode_id, episode.attempt] += episode.masked
    for (episode_id, attempt), count in masked.items():
        is_replayed = (episode_id, attempt) in replayed
        db.execute("INSERT INTO members VALUES (?, ?, ?, ?)", (batch.batch_id, episode_id, attempt, is_replayed))
        if is_replayed:
            continue
        move_sample(db, episode_id, attempt, policy=batch.policy, target=SampleState.BATCHED)
        db.execute(
            "UPDATE samples SET batch_id = ?, masked = ? WHERE episode_id = ? AND attempt = ? AND policy = ?",
            (batch.batch_id, count, episode_id, attempt, batch.policy),
        )


def is_logged(db: sqlite3.Connection, batch: TrainingBatch, *, digest: str) -> bool:
    """Whether this very batch is logged.  Raises ConflictError where its id or step cannot be logged."""
    row = db.execute("SELECT digest FROM batches WHERE batch_id = ?", (batch.batch_id,)).fetchone()
    if row is not None:
        if row[0] == digest:
            return True
        raise IdempotencyConflict(f"batch {batch.batch_id} is logged with another content")
    lineage, base_step = newest_lineage(db, batch.policy)
    if batch.lineage != lineage:
        raise ConflictError(
            f"policy {batch.policy!r}: expected a batch of lineage {lineage}, got lineage {batch.lineage}; a rollback"
            " abandoned it"
        )
    (last,) = db.execute(
        "SELECT MAX(step) FROM batches WHERE policy = ? AND lineage = ?", (batch.policy, lineage)
    ).fetchone()
    if last is None and lineage:
        last = base_step
    if last is not None and batch.step != last + 1:
        raise ConflictError(f"policy {batch.policy!r}: expected a batch of step {last + 1}, got step {batch.step}")
    return False


def newest_lineage(db: sqlite3.Connection, policy: str) -> tuple[int, int]:
    """Its number, and the step at which it began."""
    row = db.execute(
        "SELECT lineage, base_step FROM lineages WHERE policy = ? ORDER BY lineage DESC LIMIT 1", (policy,)
    ).fetchone()
    return (0, 0) if row is None else (int(row[0]), int(row[1]))


def insert_batch(
    db: sqlite3.Connection, batch: TrainingBatch, *, group_ids: str, digest: str, payload: bytes, now: float
) -> None:
    db.execute(
        """INSERT INTO batches (batch_id, policy, lineage, step, group_ids, seed, state, logged_s, digest, payload)
        VALUES (?, ?, ?, ?, ?, ?, 'logged', ?, ?, ?)""",
        (batch.batch_id, batch.policy, batch.lineage, batch.step, group_ids, batch.seed, now, digest, payload),
    )


def move_sample(
    db: sqlite3.Connection,
    episode_id: str,
    attempt: int,
    *,
    policy: str,
    target: SampleState,
    reason: str | None = None,
) -> None:
    key = (episode_id, attempt, policy)
    row = db.execute("SELECT state FROM samples WHERE episode_id = ? AND attempt = ? AND policy = ?", key).fetchone()
    if row is None:
        raise NotFoundError(f"episode {episode_id} attempt {attempt} has no finished samples of policy {policy!r}")
    check_sample(episode_id, attempt, current=SampleState(row[0]), target=target)
    db.execute(
        "UPDATE samples SET state = ?, reason = ? WHERE episode_id = ? AND attempt = ? AND policy = ?",
        (target, reason, *key),
    )


def drop_samples(db: sqlite3.Connection, dropped: Sequence[Dropped], *, policy: str) -> None:
    for episode_id, attempt, reason in dropped:
        move_sample(db, episode_id, attempt, policy=policy, target=SampleState.DROPPED, reason=reason)
