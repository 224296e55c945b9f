"""Reading a ledger: for resuming a run, and for ``inspect`` while another process writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from wingbeat.core.errors import SetupError, UnknownEpisode
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.ledger_attempts import attempts_begun, begun, running_attempts
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_connection import captures_folder, connect_read_only
from wingbeat.dataflow.ledger_damage import is_damage, name_damage
from wingbeat.dataflow.ledger_decoding import (
    GROUP_COLUMNS,
    UNCONSUMED_COLUMNS,
    decode_batch,
    group_spec,
    ready_groups,
    record_of,
    restored_slots,
    sample_statuses,
)
from wingbeat.dataflow.ledger_lineages import read_ancestry
from wingbeat.dataflow.ledger_migrations import check_version, schema_version
from wingbeat.dataflow.ledger_report_reader import LedgerReports
from wingbeat.dataflow.ledger_rows import HALTS, OPERATORS
from wingbeat.dataflow.ledger_schema import ERASED, SCHEMA_VERSION, AttemptState
from wingbeat.dataflow.ledger_transactions import in_doubt, read_decision, read_record
from wingbeat.dataflow.ledger_views import (
    AttemptView,
    InDoubt,
    OpenGroup,
    RunMeta,
    RunningAttempt,
)
from wingbeat.dataflow.lineages import Ancestry
from wingbeat.dataflow.records import EpisodeRecord, GroupSpec, ReadyGroup


class LedgerReader(LedgerReports):
    """Read-only access; safe to use from several threads."""

    def meta(self) -> RunMeta:
        """Which run this is."""
        found = self._meta("key IN ('run_id', 'seed', 'config')")
        return RunMeta(run_id=found["run_id"], seed=int(found["seed"]), config=found["config"])

    def load_dealer_state(self) -> dict[str, Any] | None:
        """What was last saved of the task dealer; None before that."""
        text = self._meta("key = 'dealer'").get("dealer")
        return None if text is None else msgspec.json.decode(text, type=dict[str, Any])

    def load_operator_states(self) -> dict[str, dict[str, Any]]:
        """What was last saved of each policy's operator chain."""
        found = self._meta("key LIKE ? || '%'", (OPERATORS,))
        return {
            key.removeprefix(OPERATORS): msgspec.json.decode(text, type=dict[str, Any]) for key, text in found.items()
        }

    def halt_of(self, policy: str, *, settings: str) -> str:
        """Why training of a policy ended for good; "" where it did not, or where other settings ended it."""
        text = self._meta("key = ?", (f"{HALTS}{policy}",)).get(f"{HALTS}{policy}")
        found = {} if text is None else msgspec.json.decode(text, type=dict[str, str])
        return found["reason"] if found.get("settings") == settings else ""

    def ancestry(self, policy: str) -> Ancestry:
        """The lineages of a policy."""
        with self.snapshot() as connection:
            return read_ancestry(connection, policy)

    def episode(self, episode_id: str) -> tuple[AttemptView, ...]:
        """All attempts of an episode that began.  Raises UnknownEpisode where there is none."""
        with self.snapshot() as connection:
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
                    cause=row["cause"],
                    client=row["client"],
                    code=row["code"],
                    transaction_id=row["transaction_id"] or "",
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
        """The turns of an attempt without a finish that counts (running, lost, ...), in order, as they were captured.

        None where the attempt finished or was aborted, or had no turn.
        """
        return () if self._has_ended(episode_id, attempt) else self._captures.read(episode_id, attempt)

    def _has_ended(self, episode_id: str, attempt: int) -> bool:
        query = "SELECT state FROM episodes WHERE episode_id = ? AND attempt = ?"
        rows = self._rows(query, (episode_id, attempt))
        return bool(rows) and rows[0]["state"] in (AttemptState.FINISHED, AttemptState.ABORTED)

    def running_attempts(self) -> tuple[RunningAttempt, ...]:
        """Attempts of open groups that may still finish (running, lost, prepared), in order of their beginning."""
        with self.snapshot() as connection:
            return running_attempts(connection)

    def attempts_begun(self, episode_id: str) -> tuple[RunningAttempt, ...]:
        """All attempts of an episode, whatever became of them; none of an unknown one."""
        with self.snapshot() as connection:
            return attempts_begun(connection, episode_id)

    def begun(self, idempotency_key: str) -> RunningAttempt | None:
        """The newest attempt that a request of this idempotency key began."""
        with self.snapshot() as connection:
            return begun(connection, idempotency_key)

    def finish_of(self, episode_id: str, attempt: int) -> EpisodeRecord | None:
        """The record of an attempt that is finished or prepared."""
        with self.snapshot() as connection:
            return read_record(connection, episode_id, attempt)

    def decision(self, transaction_id: str) -> bool | None:
        """Whether a transaction was committed; None where this ledger knows of no decision."""
        with self.snapshot() as connection:
            return read_decision(connection, transaction_id)

    def in_doubt(self) -> tuple[InDoubt, ...]:
        """Prepared finishes whose transaction is undecided, oldest first."""
        with self.snapshot() as connection:
            return in_doubt(connection)

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
                with self._naming_damage():
                    found = group_spec(group), tuple(record_of(row) for row in rows)
                yield found

    def open_groups(self) -> tuple[OpenGroup, ...]:
        """Groups that had not closed, oldest first, with their finished members and used-up attempts."""
        with self.snapshot() as connection:
            groups = connection.execute(
                f"""SELECT {GROUP_COLUMNS} FROM groups g JOIN tasks t USING (task_key)
                WHERE g.state = 'open' ORDER BY g.group_key"""
            ).fetchall()
            return tuple(OpenGroup(group_spec(row), slots=restored_slots(connection, row)) for row in groups)

    def unconsumed(self, policy: str) -> tuple[ReadyGroup, ...]:
        """Members of closed groups that are finished but neither batched nor dropped, to refill a buffer.

        As operators left them, with versions as they count now.
        """
        with self.snapshot() as connection:
            rows = connection.execute(
                f"""SELECT {GROUP_COLUMNS}, {UNCONSUMED_COLUMNS}
                FROM samples s JOIN episodes e USING (episode_id, attempt)
                JOIN groups g USING (group_id) JOIN tasks t USING (task_key)
                WHERE s.policy = ? AND s.state = 'finished' AND g.state = 'closed'
                ORDER BY g.group_key, e.episode_id""",
                (policy,),
            )
            return ready_groups(rows, policy, read_ancestry(connection, policy))

    def batches_after(self, policy: str, step: int) -> list[TrainingBatch]:
        """Surviving batches of later steps than ``step``, in order: what a trainer restored at it must replay."""
        with self.snapshot() as connection:
            rows = connection.execute(
                """SELECT policy, step, lineage, digest, payload FROM batches
                WHERE policy = ? AND step > ? AND state != 'abandoned' ORDER BY step""",
                (policy, step),
            )
            return [decode_batch(row) for row in rows]

    def erased_after(self, policy: str, step: int) -> frozenset[tuple[str, int]]:
        """(episode id, attempt) of what batches of later steps than ``step`` trained first and was erased since."""
        rows = self._rows(
            """SELECT s.episode_id, s.attempt FROM batches b JOIN samples s USING (batch_id)
            WHERE b.policy = ? AND b.step > ? AND s.reason = ?""",
            (policy, step, ERASED),
        )
        return frozenset((str(row[0]), int(row[1])) for row in rows)

    def weights_checksum(self, policy: str, step: int) -> str:
        """Of what a surviving step's weights were when they were published; "" where nobody recorded it."""
        rows = self._rows(
            "SELECT weights_checksum FROM batches WHERE policy = ? AND step = ? AND state = 'trained'", (policy, step)
        )
        return str(rows[0]["weights_checksum"]) if rows else ""


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
    except SetupError as error:
        connection.close()
        if isinstance(error.__cause__, sqlite3.Error) and is_damage(error.__cause__):
            raise name_damage(error.__cause__, path) from error
        raise
    return LedgerReader(path, connection, captures=Captures(captures_folder(path)))
