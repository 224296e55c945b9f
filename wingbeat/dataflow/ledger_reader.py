"""Reading a ledger: for resuming a run, and for ``inspect`` while another process writes."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from wingbeat.core.errors import SetupError, UnknownEpisode
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.evaluation import EvaluationResult
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_checks import contradictions
from wingbeat.dataflow.ledger_decoding import (
    GROUP_COLUMNS,
    decode_batch,
    group_spec,
    ready_groups,
    record_of,
    restored_slots,
    sample_statuses,
)
from wingbeat.dataflow.ledger_lineages import read_ancestry
from wingbeat.dataflow.ledger_reports import TokenDecile, token_deciles
from wingbeat.dataflow.ledger_rows import OPERATORS
from wingbeat.dataflow.ledger_schema import (
    SCHEMA_VERSION,
    AttemptState,
    BatchState,
    SampleState,
    check_version,
    schema_version,
)
from wingbeat.dataflow.ledger_views import (
    AttemptView,
    BatchCount,
    Checkpoint,
    LedgerSizes,
    LedgerSummary,
    OpenGroup,
    RunMeta,
    SampleCount,
    UnfinishedAttempt,
)
from wingbeat.dataflow.lineages import Ancestry, Lineage
from wingbeat.dataflow.records import EpisodeRecord, GroupSpec, ReadyGroup


class LedgerReader:
    """Read-only access; safe to use from several threads."""

    def __init__(self, connection: sqlite3.Connection, *, captures: Captures) -> None:
        """Takes over ``connection``; use :func:`open_read_only`."""
        connection.row_factory = sqlite3.Row
        self._captures = captures
        self._reading = connection
        self._read_lock = threading.Lock()

    def close(self) -> None:
        """A second call does nothing."""
        with self._read_lock:
            self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def meta(self) -> RunMeta:
        """Which run this is."""
        found = {str(row["key"]): str(row["value"]) for row in self._rows("SELECT key, value FROM meta")}
        return RunMeta(run_id=found["run_id"], seed=int(found["seed"]), config=found["config"])

    def load_dealer_state(self) -> dict[str, Any] | None:
        """What was last saved of the task dealer; None before that."""
        rows = self._rows("SELECT value FROM meta WHERE key = 'dealer'")
        return msgspec.json.decode(rows[0]["value"], type=dict[str, Any]) if rows else None

    def load_operator_states(self) -> dict[str, dict[str, Any]]:
        """What was last saved of each policy's operator chain."""
        rows = self._rows("SELECT key, value FROM meta WHERE key LIKE ? || '%'", (OPERATORS,))
        return {
            str(row["key"]).removeprefix(OPERATORS): msgspec.json.decode(row["value"], type=dict[str, Any])
            for row in rows
        }

    def ancestry(self, policy: str) -> Ancestry:
        """The lineages of a policy."""
        with self._read_lock:
            return read_ancestry(self._reading, policy)

    def episode(self, episode_id: str) -> tuple[AttemptView, ...]:
        """All attempts of an episode that began.  Raises UnknownEpisode where there is none."""
        with self._snapshot() as connection:
            rows = connection.execute(
                f"""SELECT {GROUP_COLUMNS}, e.* FROM episodes e JOIN groups g USING (group_id)
                JOIN tasks t USING (task_key) WHERE e.episode_id = ? ORDER BY e.attempt""",
                (episode_id,),
            ).fetchall()
            if not rows:
                raise UnknownEpisode(f"no attempt of an episode {episode_id!r} is recorded")
            return tuple(
                AttemptView(
                    group=group_spec(row),
                    state=AttemptState(row["state"]),
                    episode_id=row["episode_id"],
                    attempt=row["attempt"],
                    label=row["label"],
                    created_s=row["created_s"],
                    record=record_of(row) if row["state"] == AttemptState.FINISHED else None,
                    samples=sample_statuses(connection, episode_id, row["attempt"]),
                    outcome=None if row["outcome"] is None else Outcome(row["outcome"]),
                    message=row["message"],
                    ended_s=row["finished_s"],
                )
                for row in rows
            )

    def attempts(self, *, split: Split | None = None) -> Iterator[AttemptView]:
        """Every attempt (of one split) that had begun by the first ``next``, episodes in order of their beginning.

        One episode is in memory at a time, each as it is when its turn comes.
        """
        rows = self._rows(
            """SELECT episode_id FROM episodes JOIN groups USING (group_id) WHERE ? = '' OR split = ?
            GROUP BY episode_id ORDER BY MIN(episodes.rowid)""",
            ("" if split is None else split, "" if split is None else split),
        )
        for row in rows:
            yield from self.episode(row["episode_id"])

    def captured_turns(self, episode_id: str, attempt: int) -> tuple[bytes, ...]:
        """The turns of an attempt that has no record (running, lost or interrupted), in order, as they were captured.

        None where the attempt finished or was aborted, or had no turn.
        """
        return () if self._has_ended(episode_id, attempt) else self._captures.read(episode_id, attempt)

    def _has_ended(self, episode_id: str, attempt: int) -> bool:
        query = "SELECT state FROM episodes WHERE episode_id = ? AND attempt = ?"
        rows = self._rows(query, (episode_id, attempt))
        return bool(rows) and rows[0]["state"] in (AttemptState.FINISHED, AttemptState.ABORTED)

    def recent_episodes(self, limit: int, *, split: Split | None = None) -> tuple[str, ...]:
        """Ids of the episodes (of one split) that finished last, newest first."""
        rows = self._rows(
            """SELECT episode_id FROM episodes JOIN groups USING (group_id)
            WHERE episodes.state = 'finished' AND (? = '' OR split = ?)
            GROUP BY episode_id ORDER BY MAX(finished_s) DESC LIMIT ?""",
            ("" if split is None else split, "" if split is None else split, limit),
        )
        return tuple(row["episode_id"] for row in rows)

    def unfinished_attempts(self, limit: int) -> tuple[UnfinishedAttempt, ...]:
        """Those that began last, newest first, among the attempts without a record (running, lost, aborted, ...)."""
        rows = self._rows(
            """SELECT episode_id, attempt, state FROM episodes WHERE state != 'finished'
            ORDER BY created_s DESC, episode_id, attempt DESC LIMIT ?""",
            (limit,),
        )
        return tuple(UnfinishedAttempt(row["episode_id"], row["attempt"], AttemptState(row["state"])) for row in rows)

    def training_groups(self) -> Iterator[tuple[GroupSpec, tuple[EpisodeRecord, ...]]]:
        """Every training group with its episodes that count, oldest first; one group in memory at a time."""
        groups = self._rows(
            f"""SELECT {GROUP_COLUMNS} FROM groups g JOIN tasks t USING (task_key)
            WHERE g.split = 'train' ORDER BY g.group_key"""
        )
        for group in groups:
            rows = self._rows(
                """SELECT * FROM episodes WHERE group_id = ? AND state = 'finished' AND outcome = 'agent'
                ORDER BY episode_id, attempt""",
                (group["group_id"],),
            )
            if rows:
                yield group_spec(group), tuple(record_of(row) for row in rows)

    def open_groups(self) -> tuple[OpenGroup, ...]:
        """Groups that had not closed, oldest first, with their finished members and used-up attempts."""
        with self._snapshot() as connection:
            groups = connection.execute(
                f"""SELECT {GROUP_COLUMNS} FROM groups g JOIN tasks t USING (task_key)
                WHERE g.state = 'open' ORDER BY g.group_key"""
            ).fetchall()
            return tuple(OpenGroup(group_spec(row), slots=restored_slots(connection, row)) for row in groups)

    def unconsumed(self, policy: str) -> tuple[ReadyGroup, ...]:
        """Members of closed groups that are finished but neither batched nor dropped, to refill a buffer.

        As operators left them, with versions as they count now.
        """
        with self._snapshot() as connection:
            rows = connection.execute(
                f"""SELECT {GROUP_COLUMNS}, e.episode_id, e.attempt, e.metrics, e.payload, s.lineage, s.shaping
                FROM samples s JOIN episodes e USING (episode_id, attempt)
                JOIN groups g USING (group_id) JOIN tasks t USING (task_key)
                WHERE s.policy = ? AND s.state = 'finished' AND g.state = 'closed'
                ORDER BY g.group_key, e.episode_id""",
                (policy,),
            )
            return ready_groups(rows, policy, read_ancestry(connection, policy))

    def batches_after(self, policy: str, step: int) -> list[TrainingBatch]:
        """Surviving batches of later steps than ``step``, in order: what a trainer restored at it must replay."""
        rows = self._rows(
            "SELECT payload FROM batches WHERE policy = ? AND step > ? AND state != 'abandoned' ORDER BY step",
            (policy, step),
        )
        return [decode_batch(row["payload"]) for row in rows]

    def batches(self) -> tuple[BatchCount, ...]:
        """Logged and trained batches in numbers, policy by policy."""
        rows = self._rows(
            """SELECT policy, state, COUNT(*), MIN(step), MAX(step), SUM(LENGTH(payload)) FROM batches
            GROUP BY policy, state ORDER BY policy, state DESC"""
        )
        return tuple(BatchCount(p, BatchState(state), n, first, last, size) for p, state, n, first, last, size in rows)

    def sizes(self) -> LedgerSizes:
        """What the run's ledger takes on disk; reads all of it, so a large one takes a while."""
        (episodes,) = self._rows(
            """SELECT COUNT(*), COALESCE(SUM(LENGTH(payload)), 0), COALESCE(SUM(LENGTH(graph)), 0) FROM episodes
            WHERE state = 'finished'"""
        )
        ((batches,),) = self._rows("SELECT COALESCE(SUM(LENGTH(payload)), 0) FROM batches")
        path = Path(next(row["file"] for row in self._rows("PRAGMA database_list") if row["name"] == "main"))
        log = path.with_name(f"{path.name}-wal")
        return LedgerSizes(
            file=path.stat().st_size,
            write_ahead_log=log.stat().st_size if log.exists() else 0,
            captures=self._captures.num_bytes(),
            samples=episodes[1],
            graphs=episodes[2],
            batches=batches,
            num_finished=episodes[0],
        )

    def checkpoints(self, policy: str | None = None) -> tuple[Checkpoint, ...]:
        """Recorded checkpoints (of one policy), newest first."""
        rows = self._rows(
            "SELECT policy, step, path, lineage FROM checkpoints WHERE ? = '' OR policy = ? ORDER BY policy, step DESC",
            (policy or "", policy or ""),
        )
        return tuple(Checkpoint(row["policy"], row["step"], row["path"], row["lineage"]) for row in rows)

    def lineages(self) -> tuple[Lineage, ...]:
        """Those that rollbacks began, policy by policy, oldest first."""
        rows = self._rows("SELECT * FROM lineages ORDER BY policy, lineage")
        return tuple(Lineage(**dict(row)) for row in rows)

    def evaluations(self) -> tuple[EvaluationResult, ...]:
        """Recorded evaluations, oldest first; ``done`` is False where one was interrupted."""
        rows = self._rows("SELECT result FROM evaluations ORDER BY recorded_s, evaluation_id")
        return tuple(msgspec.json.decode(row["result"], type=EvaluationResult) for row in rows)

    def summary(self) -> LedgerSummary:
        """Counts over the whole run, from one snapshot."""
        with self._snapshot() as connection:
            attempts = """SELECT CASE state WHEN 'finished' THEN 'finished:' || outcome ELSE state END, COUNT(*)
                FROM episodes GROUP BY 1"""
            samples = connection.execute(
                """SELECT policy, state, reason, COUNT(*), SUM(num_tokens) FROM samples
                GROUP BY policy, state, reason ORDER BY policy, state, reason"""
            )
            steps = """SELECT policy, MAX(step) FROM (SELECT policy, step FROM batches WHERE state = 'trained'
                UNION ALL SELECT policy, base_step FROM lineages l WHERE lineage =
                    (SELECT MAX(lineage) FROM lineages WHERE policy = l.policy)) GROUP BY policy"""
            return LedgerSummary(
                num_tasks=_count(connection, "tasks"),
                groups=_counts(connection, "SELECT state, COUNT(*) FROM groups GROUP BY state"),
                attempts=_counts(connection, attempts),
                samples=tuple(SampleCount(p, SampleState(state), r, n, tokens) for p, state, r, n, tokens in samples),
                trained_step=_counts(connection, steps),
                num_evaluations=_count(connection, "evaluations"),
            )

    def token_deciles(self) -> tuple[TokenDecile, ...]:
        """What became of the sampled tokens, by length of the episode."""
        with self._snapshot() as connection:
            return token_deciles(connection)

    def verify(self) -> list[str]:
        """Contradictions in the file, in words; empty for every ledger that only :class:`Ledger` wrote."""
        with self._snapshot() as connection:
            return contradictions(connection)

    def _rows(self, query: str, parameters: tuple[str | int, ...] = ()) -> list[sqlite3.Row]:
        with self._read_lock:
            return self._reading.execute(query, parameters).fetchall()

    @contextmanager
    def _snapshot(self) -> Generator[sqlite3.Connection]:
        """Several queries that see one state."""
        with self._read_lock:
            self._reading.execute("BEGIN")
            try:
                yield self._reading
            finally:
                self._reading.execute("COMMIT")


def open_read_only(path: Path) -> LedgerReader:
    """Open an existing ledger without writing to it, also while a server does.

    Raises SetupError where there is none, or one of another schema version.
    """
    connection = connect_read_only(path)
    try:
        version = schema_version(connection)
        check_version(version)
        if version < SCHEMA_VERSION:
            raise SetupError(
                f"{path} has schema version {version}, expected {SCHEMA_VERSION}; start its run once, which upgrades it"
            )
    except SetupError:
        connection.close()
        raise
    return LedgerReader(connection, captures=Captures(captures_folder(path)))


def captures_folder(path: Path) -> Path:
    """Where the captured turns of the ledger at ``path`` are."""
    return path.with_name("turns")


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that cannot write.  Raises SetupError where there is no such file."""
    if not path.is_file():
        raise SetupError(f"expected a ledger at {path}, found none; name the directory of a run")
    uri = f"{path.resolve().as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA busy_timeout = 5000")
    return connection


def _count(connection: sqlite3.Connection, table: str) -> int:
    (count,) = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
    return int(count)


def _counts(connection: sqlite3.Connection, query: str) -> dict[str, int]:
    return {str(key): int(count) for key, count in connection.execute(query)}
