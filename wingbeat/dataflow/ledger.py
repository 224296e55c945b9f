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

import fcntl
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import zstandard

from wingbeat.core.errors import ConflictError, EpisodeClosed, NotFoundError, SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.evaluation import EvaluationResult
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_lineages import begin_lineage
from wingbeat.dataflow.ledger_reader import LedgerReader, captures_folder, connect_read_only
from wingbeat.dataflow.ledger_rows import (
    attempt_row,
    drop_samples,
    group_row,
    insert_batch,
    insert_group,
    insert_members,
    insert_samples,
    is_logged,
    is_repeated_finish,
    save_operators,
    set_meta,
    shape_samples,
    to_json,
    write_finish,
)
from wingbeat.dataflow.ledger_schema import AttemptState, check_attempt, migrate
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.ledger_writer import CommitThread, has_no_room
from wingbeat.dataflow.lineages import Lineage
from wingbeat.dataflow.records import Dropped, EpisodeRecord, GroupSpec, Shaping

COMPRESSION_LEVEL = 1
"""zstd: token ids and versions shrink at any level, logprobs at none."""

WallClock = Callable[[], float]

_pack = msgspec.msgpack.Encoder().encode


class Ledger(LedgerReader):
    """The only writer of a run's ledger; reads see every write whose future has resolved."""

    def __init__(self, path: Path, *, lock: BinaryIO, writing: sqlite3.Connection, clock: WallClock) -> None:
        """Use :meth:`open`."""
        super().__init__(connect_read_only(path), captures=Captures(captures_folder(path)))
        self._captures.prepare()
        self._lock_file = lock
        self._clock = clock
        self._commits = CommitThread(writing)
        self._compress = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress

    @classmethod
    def open(cls, path: Path, *, run: RunMeta, clock: WallClock = time.time) -> Self:
        """Create a run's ledger or continue it.

        Attempts that were running when the last server stopped become ``interrupted``.  Raises
        SetupError where another process writes this ledger, where it belongs to another run or seed,
        where it has a newer schema, or where the disk is full.
        """
        lock = _lock(path)
        writing: sqlite3.Connection | None = None
        try:
            writing = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            _configure(writing)
            migrate(writing)
            writing.execute("PRAGMA foreign_keys = ON")
            _adopt(writing, run)
            ledger = cls(path, lock=lock, writing=writing, clock=clock)
        except (SetupError, sqlite3.Error, OSError) as error:
            if writing is not None:
                writing.close()
            lock.close()
            if has_no_room(error):
                raise SetupError(f"the ledger {path} cannot be written: {error}; make room on its disk") from error
            raise
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
        self._commits.close()
        super().close()
        self._lock_file.close()

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
    ) -> Future[bool]:
        """A group takes no more members; ``reason`` says why, where it was dropped.  False: it was closed before.

        What operators made of it is saved in the same transaction, so that after a crash no chain sees a group
        twice: per policy the members that they ``dropped``, the ``shaping`` of the others, and the chains' states.
        Of a group that was closed before, nothing is saved again.
        """
        now, drops, states = self._clock(), dict(dropped or {}), dict(operators or {})

        def job(db: sqlite3.Connection) -> bool:
            group_row(db, group_id)
            update = (
                "UPDATE groups SET state = 'closed', reason = ?, closed_s = ? WHERE group_id = ? AND state = 'open'"
            )
            if not db.execute(update, (reason, now, group_id)).rowcount:
                return False
            shape_samples(db, shaping)
            for policy, members in drops.items():
                drop_samples(db, members, policy=policy)
            save_operators(db, states)
            return True

        return self._commits.submit(job)

    def record_begin(self, episode_id: str, attempt: int, *, group_id: str, label: str = "") -> Future[None]:
        """An attempt began.  Fails with ConflictError where it, or a later one, had begun before."""
        now = self._clock()
        self._captures.remove(episode_id, attempt)  # of a begin that a kill kept from the ledger

        def job(db: sqlite3.Connection) -> None:
            group_row(db, group_id)
            newest = db.execute("SELECT MAX(attempt) FROM episodes WHERE episode_id = ?", (episode_id,)).fetchone()[0]
            if newest is not None and newest >= attempt:
                raise ConflictError(
                    f"episode {episode_id}: attempt {newest} has begun, {attempt} cannot begin after it"
                )
            db.execute(
                """INSERT INTO episodes (episode_id, attempt, group_id, label, state, created_s)
                VALUES (?, ?, ?, ?, ?, ?)""",
                (episode_id, attempt, group_id, label, AttemptState.RUNNING, now),
            )

        return self._commits.submit(job)

    def capture_turn(self, episode_id: str, attempt: int, turn: bytes) -> None:
        """Keep a running attempt's turn; :meth:`captured_turns` gives it back also after this process was killed.

        Call it before the turn is answered: once it returns, the operating system has the bytes (no disk
        is waited for).  Raises UnavailableError where it does not take them.
        """
        self._captures.append(episode_id, attempt, turn)

    def sweep_captures(self) -> None:
        """Remove what ended attempts left because their server was killed between the record and the removal."""
        for episode_id, attempt in self._captures.attempts():
            if self._has_ended(episode_id, attempt):
                self._captures.remove(episode_id, attempt)

    def record_end(
        self, episode_id: str, attempt: int, *, state: AttemptState, outcome: Outcome, message: str = ""
    ) -> Future[None]:
        """A running attempt was lost or aborted: it uses up one of its slot's attempts."""
        if state not in (AttemptState.LOST, AttemptState.ABORTED):
            raise ValueError(f"record_end: expected lost or aborted, got {state}; use record_finish for a finish")
        if outcome is Outcome.AGENT:
            raise ValueError("record_end: outcome agent means that the episode ran to its end; use record_finish")
        now = self._clock()

        def job(db: sqlite3.Connection) -> None:
            row = attempt_row(db, episode_id, attempt)
            if row is None:
                raise NotFoundError(f"episode {episode_id} attempt {attempt} was never recorded; record_begin first")
            check_attempt(episode_id, attempt, current=row[0], target=state)
            db.execute(
                """UPDATE episodes SET state = ?, outcome = ?, message = ?, finished_s = ?
                WHERE episode_id = ? AND attempt = ?""",
                (state, outcome, message, now, episode_id, attempt),
            )

        future = self._commits.submit(job)
        if state is AttemptState.ABORTED:  # a lost one may come back
            self._forget_turns_after(future, episode_id, attempt)
        return future

    def record_finish(self, record: EpisodeRecord) -> Future[bool]:
        """An attempt finished; acknowledge it when this resolves.  False: the same finish is recorded already.

        Samples of ``agent`` outcomes in the train split start as *finished*, those of other outcomes
        are *dropped*.  Fails with IdempotencyConflict for another body, EpisodeClosed where the group has
        closed, ConflictError where a later attempt has begun or the attempt ended otherwise.
        """
        packed = _pack(record.samples)

        def job(db: sqlite3.Connection) -> bool:
            if is_repeated_finish(db, record):
                return False
            split, state = group_row(db, record.group_id)
            if state != "open":
                raise EpisodeClosed(f"episode {record.episode_id}: its group {record.group_id} has closed")
            graph = self._compress(record.graph) if record.graph else None
            write_finish(db, record, payload=self._compress(packed), graph=graph)
            if split is Split.TRAIN:
                insert_samples(db, record)
            return True

        future = self._commits.submit(job)
        self._forget_turns_after(future, record.episode_id, record.attempt)
        return future

    def _forget_turns_after(self, write: Future[Any], episode_id: str, attempt: int) -> None:
        """Once the end is durable, the captured turns have served."""

        def forget(done: Future[Any]) -> None:
            if done.exception() is None:
                self._captures.remove(episode_id, attempt)

        write.add_done_callback(forget)

    def log_batch(
        self, batch: TrainingBatch, *, group_ids: Sequence[str], dropped: Iterable[Dropped] = ()
    ) -> Future[bool]:
        """Log what a step will train, before it is taken.  False: this very batch is logged already.

        Its members become *batched* and ``dropped`` ones *dropped*, in one transaction; ``batch.replayed`` ones
        stay as they are.  Fails with ConflictError where another member is not *finished*, or the step is not the
        one after the last of the policy's newest lineage.
        """
        packed, now, drops = _pack(batch), self._clock(), tuple(dropped)
        digest, groups = hashlib.sha256(packed).hexdigest(), to_json(list(group_ids))

        def job(db: sqlite3.Connection) -> bool:
            if is_logged(db, batch, digest=digest):
                return False
            insert_batch(db, batch, group_ids=groups, digest=digest, payload=self._compress(packed), now=now)
            insert_members(db, batch)
            drop_samples(db, drops, policy=batch.policy)
            return True

        return self._commits.submit(job)

    def mark_trained(
        self, policy: str, *, step: int, metrics: Mapping[str, float], advantages: Mapping[str, float]
    ) -> Future[bool]:
        """A logged step was taken.  False: it was before (a replay), and what was recorded then stays.

        ``advantages`` are keyed ``"episode_id:attempt:agent"``.
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


def _lock(path: Path) -> BinaryIO:
    """Hold the ledger for this process until the file is closed (the system closes it for a killed one)."""
    if not path.parent.is_dir():
        raise SetupError(f"expected the run directory {path.parent}, found none; create it first")
    try:
        lock = path.with_name(f"{path.name}.lock").open("ab")
    except OSError as error:
        raise SetupError(f"the ledger {path} cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise SetupError(f"another server writes {path}; stop it or choose another run name") from error
    return lock


def _configure(db: sqlite3.Connection) -> None:
    """WAL lets readers read while we write; FULL syncs at every commit, which is what "durable" means here."""
    try:
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.DatabaseError as error:
        raise SetupError(f"expected a Wingbeat ledger, got a file that SQLite cannot open: {error}") from error
    if mode != "wal":
        raise SetupError(f"the ledger's file system does not support SQLite's WAL (got {mode!r}); use a local disk")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA busy_timeout = 5000")


def _adopt(db: sqlite3.Connection, run: RunMeta) -> None:
    """Check that the ledger is this run's, and settle what the last server left running."""
    known = {str(key): str(value) for key, value in db.execute("SELECT key, value FROM meta")}
    for key, wanted in (("run_id", run.run_id), ("seed", str(run.seed))):
        if known.get(key, wanted) != wanted:
            fix = f", or leave run.seed out, or set it to {known[key]}" if key == "seed" else ""
            raise SetupError(f"this ledger has {key} {known[key]!r}, got {wanted!r}; choose another run directory{fix}")
    db.execute("BEGIN IMMEDIATE")
    for key, value in (("run_id", run.run_id), ("seed", str(run.seed)), ("config", run.config)):
        set_meta(db, key, value)
    db.execute(
        "UPDATE episodes SET state = ?, message = 'the server stopped' WHERE state = ?",
        (AttemptState.INTERRUPTED, AttemptState.RUNNING),
    )
    db.execute("COMMIT")
