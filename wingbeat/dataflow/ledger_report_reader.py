"""What people and tools ask of a ledger: counts, sizes, reports, and whether it is sound."""

from __future__ import annotations

import sqlite3

import msgspec

from wingbeat.core.types import Split
from wingbeat.dataflow.evaluation import EvaluationResult
from wingbeat.dataflow.ledger_checks import contradictions
from wingbeat.dataflow.ledger_connection import LedgerConnection
from wingbeat.dataflow.ledger_reports import ClientCount, Ending, TokenDecile, clients, endings, token_deciles
from wingbeat.dataflow.ledger_schema import AttemptState, BatchState, SampleState
from wingbeat.dataflow.ledger_versions import AgentVersionReport, agent_versions
from wingbeat.dataflow.ledger_views import (
    BatchCount,
    Checkpoint,
    LedgerSizes,
    LedgerSummary,
    SampleCount,
    UnfinishedAttempt,
)
from wingbeat.dataflow.lineages import Lineage


class LedgerReports(LedgerConnection):
    """The part of :class:`ledger_reader.LedgerReader` that counts."""

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
        path = self._path
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
        rows = self._rows(
            """SELECT policy, lineage, base_lineage, base_step, reason, began_s FROM lineages
            ORDER BY policy, lineage"""
        )
        return tuple(Lineage(**dict(row)) for row in rows)

    def evaluations(self) -> tuple[EvaluationResult, ...]:
        """Recorded evaluations, oldest first; ``done`` is False where one was interrupted."""
        rows = self._rows("SELECT result FROM evaluations ORDER BY rowid")
        return tuple(msgspec.json.decode(row["result"], type=EvaluationResult) for row in rows)

    def summary(self) -> LedgerSummary:
        """Counts over the whole run, from one snapshot."""
        with self.snapshot() as connection:
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

    def endings(self) -> tuple[Ending, ...]:
        """All attempts by how they ended."""
        with self.snapshot() as connection:
            return endings(connection)

    def clients(self) -> tuple[ClientCount, ...]:
        """Who ran the attempts."""
        with self.snapshot() as connection:
            return clients(connection)

    def token_deciles(self) -> tuple[TokenDecile, ...]:
        """What became of the sampled tokens, by length of the episode."""
        with self.snapshot() as connection:
            return token_deciles(connection)

    def verify(self) -> list[str]:
        """Contradictions in the file, in words; empty for every ledger that only :class:`Ledger` wrote."""
        with self.snapshot() as connection:
            return contradictions(connection)

    def agent_versions(self) -> tuple[AgentVersionReport, ...]:
        """What every version of an agent did, in the order in which they came."""
        with self.snapshot() as connection:
            return agent_versions(connection)

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


def _count(connection: sqlite3.Connection, table: str) -> int:
    (count,) = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
    return int(count)


def _counts(connection: sqlite3.Connection, query: str) -> dict[str, int]:
    return {str(key): int(count) for key, count in connection.execute(query)}
