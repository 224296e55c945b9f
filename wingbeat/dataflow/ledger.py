"""The ledger: what must survive, in one SQLite file.

Every write returns a future that resolves once the write is on disk; writes take effect in the
order of the calls.  Killing the process at any moment loses nothing that was acknowledged, and the
state that remains is one that a prefix of the calls had produced.

Typical order: ``record_group`` -> ``record_begin`` -> ``record_finish`` (acknowledge to the client when it
resolves) -> ``close_group`` -> ``log_batch`` (send the step to the trainer when it resolves) -> ``mark_trained``.
Where a trainer cannot come back to the last step, ``begin_lineage`` gives up the steps that it lost.
Between begin and finish, ``capture_turn`` keeps each turn beside the ledger until the attempt's end is on record.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Self

from wingbeat.core.errors import ConflictError, NotFoundError, SetupError, WingbeatError
from wingbeat.core.files import OWNER_ONLY
from wingbeat.core.samples import TrainingBatch
from wingbeat.dataflow.evaluation import EvaluationResult
from wingbeat.dataflow.ledger_attempt_writes import AttemptWrites, WallClock, compress, pack
from wingbeat.dataflow.ledger_backup import Backup, Stop, back_up
from wingbeat.dataflow.ledger_damage import name_damage
from wingbeat.dataflow.ledger_integrity import teach
from wingbeat.dataflow.ledger_lineages import begin_lineage
from wingbeat.dataflow.ledger_migrations import migrate
from wingbeat.dataflow.ledger_opening import (
    LedgerCheck,
    adopt,
    check_pages,
    check_rows,
    configure,
    leave_closing_mark,
    lock_ledger,
    require_content,
    take_closing_mark,
)
from wingbeat.dataflow.ledger_rows import (
    HALTS,
    close_open_group,
    drop_samples,
    insert_batch,
    insert_group,
    insert_members,
    is_logged,
    save_operators,
    set_meta,
    shape_samples,
    to_json,
)
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.ledger_writer import CommitThread, has_no_room
from wingbeat.dataflow.lineages import Lineage
from wingbeat.dataflow.records import Dropped, GroupSpec, Shaping


class Ledger(AttemptWrites):
    """The only writer of a run's ledger; reads see every write whose future has resolved."""

    def __init__(
        self, path: Path, *, lock: BinaryIO, writing: sqlite3.Connection, check: LedgerCheck, clock: WallClock
    ) -> None:
        """Use :meth:`open`."""
        self.check = check
        """How it was checked when it was opened."""
        super().__init__(path, CommitThread(writing, explain=lambda error: name_damage(error, path)), clock=clock)
        try:
            self._captures.prepare()
        except BaseException:
            super().close()
            self._commits.close()  # nobody else could end its thread
            raise
        self._lock_file = lock

    @classmethod
    def open(cls, path: Path, *, run: RunMeta, clock: WallClock = time.time) -> Self:
        """Create a run's ledger or continue it.

        Attempts that were running when the last server stopped still are: take up :meth:`running_attempts`, and
        let :meth:`interrupt_running` end the others.  Raises SetupError where another process writes this ledger,
        where it belongs to another run or seed, where it has a newer schema, or where the disk is full; LedgerCorrupt
        where it is damaged.
        """
        lock = lock_ledger(path)
        writing: sqlite3.Connection | None = None
        try:
            writing, check = _open_for_writing(path, lock, run)
            ledger = cls(path, lock=lock, writing=writing, check=check, clock=clock)
        except (WingbeatError, sqlite3.Error, UnicodeDecodeError, OSError) as error:
            if writing is not None:
                writing.close()
            lock.close()
            if has_no_room(error):
                raise SetupError(f"the ledger {path} cannot be written: {error}; make room on its disk") from error
            if isinstance(error, OSError):
                raise
            named = name_damage(error, path)
            if isinstance(named, sqlite3.Error):
                named = SetupError(f"the ledger {path} cannot be opened: {error}")
            raise named from (None if named is error else error)
        ledger.sweep_captures()
        return ledger

    @property
    def blocked(self) -> str:
        """Why nothing can be recorded now although nothing is lost, for people; "" while all is well."""
        said = self._commits.blocked
        if not said:
            return ""
        return (
            f"the disk is full: the ledger cannot be written ({said}); training pauses and resumes when space"
            " returns; nothing is lost"
        )

    def close(self) -> None:
        """Commit what is pending and let others open the ledger; a second call does nothing.

        What a full disk keeps from being committed is refused.
        """
        super().close()  # the last connection to close takes the write-ahead log with it: that must be the writer's
        is_first = self._commits.close()
        if is_first and not self._commits.blocked:
            leave_closing_mark(self._lock_file, self._path)
        self._lock_file.close()

    def back_up(self, *, stop: Stop = lambda: False) -> Backup | None:
        """Make the last good copy, while writes go on; see :func:`ledger_backup.back_up`.  Call it in a thread."""
        return back_up(self._path, clock=self._clock, stop=stop)

    def record_group(
        self, spec: GroupSpec, *, episode_ids: Sequence[str], dealer_state: Mapping[str, Any] | None = None
    ) -> Future[None]:
        """A group was admitted.

        Pass the dealer's state of that moment: both are saved together, so that a crash neither skips
        the task nor deals it twice.  Fails with ConflictError where the group exists.
        """
        now = self._clock()

        def job(db: sqlite3.Connection) -> None:
            if db.execute("SELECT 1 FROM groups WHERE group_id = ?", (spec.id,)).fetchone():
                raise ConflictError(f"group {spec.id} is recorded already; give every group its own id")
            insert_group(db, spec, episode_ids=episode_ids, now=now)
            if dealer_state is not None:
                set_meta(db, "dealer", to_json(dealer_state))

        return self._commits.submit(job)

    def close_group(
        self,
        group_id: str,
        *,
        reason: str | None = None,
        dropped: Mapping[str, Sequence[Dropped]] | None = None,
        shaping: Sequence[Shaping] = (),
        operators: Mapping[str, Mapping[str, Any]] | None = None,
        dealer_state: Mapping[str, Any] | None = None,
    ) -> Future[bool]:
        """A group takes no more members; ``reason`` says why, where it was dropped.  False: it was closed before.

        What operators made of it is saved in the same transaction, so that after a crash no chain sees a group
        twice: per policy the members that they ``dropped``, the ``shaping`` of the others, and the chains' states.
        So is ``dealer_state``, where the group's task goes back to the dealer.
        Of a group that was closed before, nothing is saved again.  Attempts that still run in it are *interrupted*.
        Fails with ConflictError while a member is prepared: its transaction may yet count it.
        """
        now, drops, states = self._clock(), dict(dropped or {}), dict(operators or {})

        def job(db: sqlite3.Connection) -> bool:
            if not close_open_group(db, group_id, reason=reason, now=now):
                return False
            shape_samples(db, shaping)
            for policy, members in drops.items():
                drop_samples(db, members, policy=policy)
            save_operators(db, states)
            if dealer_state is not None:
                set_meta(db, "dealer", to_json(dealer_state))
            return True

        return self._commits.submit(job)

    def log_batch(
        self, batch: TrainingBatch, *, group_ids: Sequence[str], dropped: Iterable[Dropped] = ()
    ) -> Future[bool]:
        """Log what a step will train, before it is taken.  False: this very batch is logged already.

        Its members become *batched* and ``dropped`` ones *dropped*, in one transaction; ``batch.replayed`` ones
        stay as they are.  Fails with ConflictError where another member is not *finished*, or the step is not the
        one after the last of the policy's newest lineage.
        """
        packed, now, drops = pack(batch), self._clock(), tuple(dropped)
        digest, groups = hashlib.sha256(packed).hexdigest(), to_json(list(group_ids))

        def job(db: sqlite3.Connection) -> bool:
            if is_logged(db, batch, digest=digest):
                return False
            insert_batch(db, batch, group_ids=groups, digest=digest, payload=compress(packed), now=now)
            insert_members(db, batch)
            drop_samples(db, drops, policy=batch.policy)
            return True

        return self._commits.submit(job)

    def mark_trained(
        self,
        policy: str,
        *,
        step: int,
        metrics: Mapping[str, float],
        advantages: Mapping[str, float],
    ) -> Future[bool]:
        """A logged step was taken.  False: it was before (a replay), and what was recorded then stays.

        ``advantages`` are keyed ``"episode_id:attempt:agent"``.  Its weights come later (:meth:`record_weights`).
        """
        now = self._clock()
        texts = (to_json(dict(metrics)), to_json(dict(advantages)))

        def job(db: sqlite3.Connection) -> bool:
            row = db.execute(
                "SELECT batch_id, state FROM batches WHERE policy = ? AND step = ? AND state != 'abandoned'",
                (policy, step),
            ).fetchone()
            if row is None:
                raise NotFoundError(f"policy {policy!r} has no batch of step {step}; log_batch comes first")
            if row[1] == "trained":
                return False
            db.execute(
                "UPDATE batches SET state = 'trained', trained_s = ?, metrics = ?, advantages = ? WHERE batch_id = ?",
                (now, *texts, row[0]),
            )
            db.execute("UPDATE samples SET state = 'trained' WHERE batch_id = ? AND state = 'batched'", (row[0],))
            return True

        return self._commits.submit(job)

    def record_weights(self, policy: str, *, step: int, checksum: str) -> Future[None]:
        """The weights of a step are published: a replay must give the same again.  Nothing, where it was abandoned."""

        def job(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE batches SET weights_checksum = ? WHERE policy = ? AND step = ? AND state = 'trained'",
                (checksum, policy, step),
            )

        return self._commits.submit(job)

    def mark_dropped(self, policy: str, *, dropped: Iterable[Dropped]) -> Future[None]:
        """Members will not train, and no batch comes that could carry them (:meth:`log_batch`).

        Fails with ConflictError, changing nothing, where one is not *finished*.
        """
        drops = tuple(dropped)
        return self._commits.submit(lambda db: drop_samples(db, drops, policy=policy))

    def begin_lineage(self, policy: str, *, base_lineage: int, base_step: int, reason: str) -> Future[Lineage]:
        """The trainer continues from a step of some lineage: the steps that it does not hold are abandoned.

        Their samples are *finished* again, ready for another batch, unless a batch that the trainer does hold has
        them, too.  Floors of groups that abandoned versions set are lowered to the version that they count as.
        """
        now = self._clock()
        return self._commits.submit(
            lambda db: begin_lineage(db, policy, base_lineage=base_lineage, base_step=base_step, reason=reason, now=now)
        )

    def record_checkpoint(self, policy: str, *, step: int, path: str, lineage: int = 0) -> Future[None]:
        """A checkpoint is complete on disk; the same step again replaces its path."""
        now = self._clock()

        def job(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO checkpoints (policy, step, path, recorded_s, lineage) VALUES (?, ?, ?, ?, ?)",
                (policy, step, path, now, lineage),
            )

        return self._commits.submit(job)

    def record_halt(self, policy: str, *, reason: str, settings: str) -> Future[None]:
        """Training of a policy ended for good, as long as the ``settings`` that ended it stay."""
        text = to_json({"reason": reason, "settings": settings})
        return self._commits.submit(lambda db: set_meta(db, f"{HALTS}{policy}", text))

    def save_dealer_state(self, state: Mapping[str, Any]) -> Future[None]:
        """Replace the saved state of the task dealer (``record_group`` does it with each group)."""
        text = to_json(state)
        return self._commits.submit(lambda db: set_meta(db, "dealer", text))

    def record_evaluation(self, result: EvaluationResult) -> Future[None]:
        """Save how far an evaluation has come; the same id again replaces it."""
        spec, text, now = result.spec, to_json(result), self._clock()

        def job(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?)",
                (spec.id, spec.policy, spec.version, result.done, text, now),
            )

        return self._commits.submit(job)


def _open_for_writing(path: Path, lock: BinaryIO, run: RunMeta) -> tuple[sqlite3.Connection, LedgerCheck]:
    """A connection to this run's whole and current ledger."""
    closed_at = take_closing_mark(lock)
    require_content(path, closed_at=closed_at)
    if not path.exists():
        path.touch(mode=OWNER_ONLY)
    writing = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        configure(writing)
        teach(writing)
        check = check_pages(writing, path, closed_at=closed_at)
        migrate(writing)
        check_rows(writing, is_whole=check.is_whole)
        writing.execute("PRAGMA foreign_keys = ON")
        adopt(writing, run)
    except BaseException:
        writing.close()
        raise
    return writing, check
