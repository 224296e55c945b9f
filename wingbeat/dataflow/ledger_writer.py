"""One thread owns the ledger's writing connection and commits in groups.

A durable commit costs one sync of the disk, whatever its size.  So the thread takes all jobs that
came while the last commit ran, runs each in a savepoint of one transaction (a refused job undoes only
itself), commits once, and resolves their futures only then::

    submit ──▶ queue ──▶ BEGIN; job, job, job; COMMIT (sync) ──▶ futures resolve

Where the disk is full nothing is refused and nothing is lost: the whole commit is undone and tried again, with
its jobs unresolved, until there is room.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from wingbeat.core import files
from wingbeat.core.errors import UnavailableError, WingbeatError
from wingbeat.dataflow.ledger_damage import LedgerError

T = TypeVar("T")

MAX_JOBS_PER_COMMIT = 512
"""Bounds how long the first job of a commit waits for the last."""

RETRY_S = 1.0
"""Between attempts to commit on a full disk."""

NO_ROOM = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE}
)
"""What SQLite reports where a file cannot grow: a full disk, or a quota or size limit that is reached."""

Wait = Callable[[threading.Event, float], object]
"""Waits until the event is set, at most for so many seconds."""


@dataclass(slots=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    future: Future[Any] = field(default_factory=Future[Any])
    result: Any = None
    error: LedgerError | None = None

    def resolve(self) -> None:
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class CommitThread:
    """Runs jobs on a connection that nobody else may use, and closes it at the end."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        wait: Wait = threading.Event.wait,
        explain: Callable[[LedgerError], LedgerError] = lambda error: error,
    ) -> None:
        """``connection`` must be in autocommit mode and usable from another thread.

        Jobs may run more than once: what they change outside of the connection must bear that.  What a job fails
        with goes through ``explain`` first.
        """
        self.blocked = ""
        """What SQLite says while the disk takes no commit, else ""."""
        self._connection = connection
        self._wait = wait
        self._explain = explain
        self._closing = threading.Event()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="wingbeat-ledger", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue a job; the future resolves when its effects are durable, on a full disk not before there is room.

        Its exception is the job's own (WingbeatError, sqlite3.Error), that of the failed commit, or
        UnavailableError where the thread died or was closed while the disk was full.  Cancelling the
        future has no effect on the job.  Raises UnavailableError after :meth:`close`.
        """
        job = _Job(run)
        job.future.set_running_or_notify_cancel()
        with self._lock:
            if self._stopped:
                raise UnavailableError("the ledger is closed: nothing can be recorded any more")
            self._queue.put(job)
        return job.future

    def close(self) -> bool:
        """Commit what is queued, then end the thread and close the connection.  False: it was closed before."""
        with self._lock:
            is_first = not self._stopped
            if is_first:
                self._stopped = True
                self._queue.put(None)
                self._closing.set()
        self._thread.join()
        return is_first

    def _run(self) -> None:
        batch: list[_Job] = []
        try:
            is_open = True
            while is_open:
                batch, is_open = self._next_batch()
                self._commit(batch)
        finally:
            self._connection.close()
            self._fail_pending(batch)

    def _next_batch(self) -> tuple[list[_Job], bool]:
        """Wait for one job, then take what else is there; False once the end mark was seen."""
        batch: list[_Job] = []
        while len(batch) < MAX_JOBS_PER_COMMIT and (not batch or not self._queue.empty()):
            job = self._queue.get()
            if job is None:
                return batch, False
            batch.append(job)
        return batch, True

    def _commit(self, batch: list[_Job]) -> None:
        while not self._try_commit(batch):
            if self._closing.is_set():
                return self._refuse(batch)
            self._wait(self._closing, RETRY_S)
        self.blocked = ""
        for job in batch:
            job.error = None if job.error is None else self._explain(job.error)
            job.resolve()

    def _try_commit(self, batch: list[_Job]) -> bool:
        """False where there is no room: nothing has happened then."""
        for job in batch:
            job.result = job.error = None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                self._run_job(job)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if has_no_room(error):
                self.blocked = str(error)
                return False
            for job in batch:
                job.error = job.error or error
        return True

    def _run_job(self, job: _Job) -> None:
        self._connection.execute("SAVEPOINT job")
        try:
            job.result = job.run(self._connection)
        except (WingbeatError, sqlite3.Error, UnicodeDecodeError) as error:
            if has_no_room(error):
                raise
            job.error = error
            if not self._connection.in_transaction:
                raise  # SQLite rolled everything back by itself (I/O error): the whole commit failed
            self._connection.execute("ROLLBACK TO job")
        self._connection.execute("RELEASE job")

    def _refuse(self, batch: list[_Job]) -> None:
        """The end came before there was room."""
        for job in batch:
            job.error = UnavailableError(f"not recorded: the ledger was closed on a full disk ({self.blocked})")
            job.resolve()

    def _fail_pending(self, batch: list[_Job]) -> None:
        """Nobody may wait for ever for a dead thread."""
        with self._lock:
            self._stopped = True
            while not self._queue.empty():
                job = self._queue.get()
                if job is not None:
                    batch.append(job)
        for job in batch:
            if not job.future.done():
                job.future.set_exception(UnavailableError("the ledger's writer died; see the log and restart"))


def has_no_room(error: Exception) -> bool:
    """Whether a write failed for want of room on the disk."""
    if isinstance(error, OSError):
        return error.errno in files.NO_ROOM
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in NO_ROOM
