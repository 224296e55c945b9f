"""What the ledger writes of attempts, from their begin to their finish."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from wingbeat.core.types import Cause, Outcome, Split
from wingbeat.dataflow.ledger_attempts import EndRow, add_key, end_attempt, insert_begin, interrupt_running
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_connection import captures_folder, connect_read_only
from wingbeat.dataflow.ledger_erase import empty_log, erase_episode
from wingbeat.dataflow.ledger_reader import LedgerReader
from wingbeat.dataflow.ledger_rows import (
    FinishRow,
    close_open_group,
    insert_group,
    insert_samples,
    is_repeated_finish,
    open_group_split,
    write_finish,
)
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_transactions import decide, is_repeated_prepare
from wingbeat.dataflow.ledger_writer import CommitThread
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec

COMPRESSION_LEVEL = 1
"""zstd: token ids and versions shrink at any level, logprobs at none."""

TURNS_KEPT_BYTES = 256 * 2**20
"""Of attempts that were lost or interrupted and can never finish."""

WallClock = Callable[[], float]

pack = msgspec.msgpack.Encoder().encode


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(data)


class AttemptWrites(LedgerReader):
    """The part of :class:`ledger.Ledger` that attempts need; every write is a future, in the order of the calls."""

    def __init__(self, path: Path, commits: CommitThread, *, clock: WallClock) -> None:
        super().__init__(path, connect_read_only(path), captures=Captures(captures_folder(path)))
        self._commits = commits
        self._clock = clock

    def record_begin(self, begin: BeginRecord) -> Future[None]:
        """An attempt began.

        Fails with EpisodeClosed where its group has closed, with ConflictError where it, or a later one, had begun
        before, or while an earlier one is prepared.
        """
        now = self._clock()
        self._captures.remove(begin.episode_id, begin.attempt)  # of a begin that a kill kept from the ledger
        return self._commits.submit(lambda db: insert_begin(db, begin, now=now))

    def add_key(self, episode_id: str, attempt: int, key_digest: str) -> Future[None]:
        """The client of a running, lost or prepared attempt got another key; the earlier ones stay good."""
        return self._commits.submit(lambda db: add_key(db, episode_id, attempt, key_digest=key_digest))

    def interrupt_running(
        self, *, keep: Collection[tuple[str, int]] = (), cause: str = Cause.SERVER_RESTART
    ) -> Future[int]:
        """After a restart: running attempts other than ``keep`` are *interrupted*, which uses up no attempt."""
        now, kept = self._clock(), frozenset(keep)
        return self._commits.submit(lambda db: interrupt_running(db, keep=kept, cause=cause, now=now))

    def capture_turn(self, episode_id: str, attempt: int, turn: bytes) -> None:
        """Keep a running attempt's turn; :meth:`captured_turns` gives it back also after this process was killed.

        Call it before the turn is answered: once it returns, the operating system has the bytes (no disk
        is waited for).  Raises UnavailableError where it does not take them.
        """
        self._captures.append(episode_id, attempt, turn)

    def recover_turns(self, episode_id: str, attempt: int) -> tuple[bytes, ...]:
        """The captured turns of an attempt that goes on in this process.  Raises ValueError where they are damaged."""
        return self._captures.recover(episode_id, attempt)

    def sweep_captures(self, *, keep_bytes: int = TURNS_KEPT_BYTES) -> None:
        """Remove what ended attempts left because their server was killed between the record and the removal.

        Lost and interrupted attempts leave their turns for people to see: the newest ``keep_bytes`` of them stay.
        """
        may_finish = {(a.begin.episode_id, a.begin.attempt) for a in self.running_attempts()}
        kept = 0
        for episode_id, attempt, size in self._captures.newest_first():
            if (episode_id, attempt) in may_finish:
                continue
            kept += size
            if kept > keep_bytes or self._has_ended(episode_id, attempt):
                self._captures.remove(episode_id, attempt)

    def record_end(
        self,
        episode_id: str,
        attempt: int,
        *,
        state: AttemptState,
        outcome: Outcome,
        cause: str = "",
        message: str = "",
    ) -> Future[None]:
        """A running attempt was lost or aborted, which uses up one of its slot's attempts, or interrupted."""
        if state not in (AttemptState.LOST, AttemptState.ABORTED, AttemptState.INTERRUPTED):
            raise ValueError(
                f"record_end: expected lost, aborted or interrupted, got {state}; use record_finish for a finish"
            )
        if outcome is Outcome.AGENT:
            raise ValueError("record_end: outcome agent means that the episode ran to its end; use record_finish")
        end = EndRow(state, outcome, cause, message, self._clock())
        future = self._commits.submit(lambda db: end_attempt(db, episode_id, attempt, end))
        if state is AttemptState.ABORTED:  # a lost one may come back
            self._forget_turns_after(future, episode_id, attempt)
        return future

    def record_finish(self, record: EpisodeRecord) -> Future[bool]:
        """An attempt finished; acknowledge it when this resolves.  False: the same finish is recorded already.

        Samples of ``agent`` outcomes in the train split start as *finished*, those of other outcomes
        are *dropped*.  Fails with IdempotencyConflict for another body, EpisodeClosed where the group has
        closed, ConflictError where a later attempt has begun or the attempt ended otherwise.
        """
        finish = self._finish_row(record)

        def job(db: sqlite3.Connection) -> bool:
            if is_repeated_finish(db, record):
                return False
            split = open_group_split(db, record.group_id, episode_id=record.episode_id)
            write_finish(db, finish())
            if split is Split.TRAIN:
                insert_samples(db, record)
            return True

        future = self._commits.submit(job)
        self._forget_turns_after(future, record.episode_id, record.attempt)
        return future

    def prepare_finish(self, record: EpisodeRecord, *, transaction_id: str, decider: str) -> Future[bool]:
        """An attempt's finish that counts once :meth:`decide` commits its transaction; acknowledge when it resolves.

        False: the same finish waits (or was committed) already.  Until then it has no samples, its group cannot
        close and no later attempt can begin.  Fails like :meth:`record_finish`, and with ConflictError where the
        transaction is decided.
        """
        finish = self._finish_row(record, transaction_id=transaction_id, decider=decider)

        def job(db: sqlite3.Connection) -> bool:
            if is_repeated_prepare(db, record, transaction_id=transaction_id):
                return False
            open_group_split(db, record.group_id, episode_id=record.episode_id)
            write_finish(db, finish())
            return True

        return self._commits.submit(job)

    def decide(self, transaction_id: str, *, commit: bool) -> Future[tuple[tuple[str, int], ...]]:
        """Record a transaction's decision for good, and settle what was prepared in it.

        Resolves to the (episode id, attempt) that are in it, the same ones on a repeat.  A transaction of which
        nothing is prepared here is decided all the same, so that nothing ever can be.  Fails with ConflictError
        for the contrary of an earlier decision.
        """
        now = self._clock()
        future = self._commits.submit(lambda db: decide(db, transaction_id, commit=commit, now=now))

        def forget(done: Future[tuple[tuple[str, int], ...]]) -> None:
            for episode_id, attempt in done.result() if done.exception() is None else ():
                self._captures.remove(episode_id, attempt)

        future.add_done_callback(forget)
        return future

    def record_collected(
        self, group: GroupSpec, record: EpisodeRecord, *, closed_because: str | None = None
    ) -> Future[bool]:
        """A conversation outside of any group is scored: open a group of one for it, begin it and finish it, at once.

        False: the same finish is recorded already.  The group stays open for its policies' operators
        (:meth:`close_group` follows), unless ``closed_because`` says why nothing of it goes on to training.  Fails
        with IdempotencyConflict for another body.
        """
        now, finish = self._clock(), self._finish_row(record)

        def job(db: sqlite3.Connection) -> bool:
            if is_repeated_finish(db, record):
                return False
            insert_group(db, group, episode_ids=[record.episode_id], now=now)
            write_finish(db, finish())
            if group.split is Split.TRAIN:
                insert_samples(db, record)
            if closed_because is not None:
                close_open_group(db, group.id, reason=closed_because, now=now)
            return True

        future = self._commits.submit(job)
        self._forget_turns_after(future, record.episode_id, record.attempt)
        return future

    def empty_log(self) -> bool:
        """After :meth:`erase_episode`: leave nothing of it in the write-ahead log, either.  Call it in a thread."""
        return empty_log(self._path)

    def erase_episode(self, episode_id: str) -> Future[int]:
        """Take an episode's text out of the ledger; resolves to the number of batches that still hold it.

        Fails with UnknownEpisode.
        """
        return self._commits.submit(lambda db: erase_episode(db, episode_id, compress=compress))

    def _finish_row(
        self, record: EpisodeRecord, *, transaction_id: str | None = None, decider: str | None = None
    ) -> Callable[[], FinishRow]:
        """What to store; packed now, since the caller's values may change, and compressed on the writer's thread."""
        packed = pack(record.samples)

        def build() -> FinishRow:
            graph = compress(record.graph) if record.graph else None
            return FinishRow(record, compress(packed), graph, transaction_id, decider)

        return build

    def _forget_turns_after(self, write: Future[Any], episode_id: str, attempt: int) -> None:
        """Once the end is durable, the captured turns have served."""

        def forget(done: Future[Any]) -> None:
            if done.exception() is None:
                self._captures.remove(episode_id, attempt)

        write.add_done_callback(forget)
