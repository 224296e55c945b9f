"""What `test_episode_histories` compares control with: leases and episodes as people may rely on them.

And the ledger's commits by hand: a kill takes with it what was not on disk yet.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from wingbeat.core.errors import WingbeatError
from wingbeat.core.protocol import BeginRequest, FinishRequest
from wingbeat.core.types import Outcome

SIZE, FLOOR = 2, 1
HEARTBEAT_S, IDLE_S, LEASE_S, TRIAL_S, DEADLINE_S, DOUBT_S = 1.0, 10.0, 60.0, 5.0, 100.0, 10.0


class CommitsByHand:
    """Stands for the ledger's writing thread: nothing is durable before :meth:`flush`."""

    def __init__(self, connection: sqlite3.Connection, **_: Any) -> None:
        self.blocked = ""
        self.connection: sqlite3.Connection | None = connection
        self.jobs: list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]] = []

    def submit(self, run: Callable[[sqlite3.Connection], Any]) -> Future[Any]:
        future = _Write(self)
        future.set_running_or_notify_cancel()
        self.jobs.append((run, future))
        return future

    def flush(self) -> None:
        db, jobs, self.jobs = self.connection, self.jobs, []
        assert db is not None
        if not jobs:
            return
        db.execute("BEGIN IMMEDIATE")
        results = [self._run(db, run) for run, _ in jobs]
        db.execute("COMMIT")
        for (_, future), (result, error) in zip(jobs, results, strict=True):
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _run(self, db: sqlite3.Connection, job: Callable[[sqlite3.Connection], Any]) -> tuple[Any, Exception | None]:
        db.execute("SAVEPOINT job")
        try:
            return job(db), None
        except WingbeatError as error:
            db.execute("ROLLBACK TO job")
            return None, error
        finally:
            db.execute("RELEASE job")

    def close(self) -> bool:
        db, self.connection = self.connection, None
        if db is not None:
            db.close()
        return db is not None


class _Write(Future[Any]):
    def __init__(self, commits: CommitsByHand) -> None:
        super().__init__()
        self._commits = commits

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._commits.flush()
        return super().result(0)


# --- the reference --------------------------------------------------------------------------------


@dataclass(eq=False)
class Attempt:
    slot: Slot
    number: int
    keys: list[str]
    """All of them good."""
    begin: BeginRequest
    state: str
    """tentative, open, lost, prepared, finished, aborted, superseded, or gone: no process knows it."""
    seen: float
    recorded: str = ""
    """Its state in the ledger; "" where it has no row."""
    beats: bool = False
    """Four missed heartbeats end it."""
    unheard: bool = False
    turns: int = 0
    finish: FinishRequest | None = None
    """What counts, or waits for its transaction."""
    prepared_at: float = 0.0
    has_place: bool = True
    """Of a prepared one: whether it counts against its client's quota."""
    is_known: bool = True
    """Its begin can be repeated."""
    is_answered: bool = True
    """By this process."""


def decides_here(attempt: Attempt) -> bool:
    assert attempt.finish is not None and attempt.finish.transaction is not None
    return not attempt.finish.transaction.decider


@dataclass(eq=False)
class Slot:
    id: str
    group: Group
    state: str = "free"
    number: int = 1
    failures: int = 0
    begun: list[Attempt] = field(default_factory=list)
    late: Attempt | None = None
    """A lost attempt whose finish still counts."""
    stood: tuple[str, int] | None = None
    """Where it was, and its number, when such a finish was prepared."""

    def release(self, *, begun: bool, uses_up: bool = True) -> None:
        self.failures += begun and uses_up
        is_last = begun and uses_up and self.failures >= self.group.max_attempts
        self.state = "given_up" if is_last else "free"
        self.number += not is_last


@dataclass(eq=False)
class Group:
    id: str
    opened: float
    max_attempts: int
    slots: list[Slot] = field(default_factory=list)
    is_open: bool = True


@dataclass
class Reference:
    groups: dict[str, Group] = field(default_factory=dict)
    leases: dict[str, tuple[Slot, int, float]] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)

    def settle(self, now: float) -> None:
        """Groups close that are complete, or past their deadline with enough members."""
        for group in self.groups.values():
            num_finished = sum(slot.state == "finished" for slot in group.slots)
            is_due = now - group.opened >= DEADLINE_S and num_finished >= FLOOR
            is_due = is_due and not any(slot.state == "prepared" for slot in group.slots)
            if not group.is_open or not (is_due or all(s.state in ("finished", "given_up") for s in group.slots)):
                continue
            group.is_open = False
            for slot in group.slots:
                if slot.state != "finished" and slot.begun and slot.begun[-1].state in ("open", "lost"):
                    last = slot.begun[-1]
                    last.recorded = "aborted" if last.state == "open" else last.recorded
                    last.state = "aborted"

    def begin(self, attempt: Attempt) -> None:
        slot = attempt.slot
        if slot.begun and slot.begun[-1].state in ("lost", "aborted"):
            slot.begun[-1].state = "superseded"
        slot.begun.append(attempt)
        slot.state, slot.late = "running", None
        attempt.state, attempt.recorded = "open", "running"

    def may_begin(self, slot: Slot, number: int) -> bool:
        return slot.group.is_open and slot.state == "leased" and slot.number == number

    def may_finish(self, attempt: Attempt) -> bool:
        return attempt.state == "open" or (attempt.state == "lost" and attempt.slot.late is attempt)

    def finish(self, attempt: Attempt, request: FinishRequest) -> None:
        slot, is_late = attempt.slot, attempt.state == "lost"
        attempt.state = attempt.recorded = "finished"
        attempt.finish = request
        if request.outcome is Outcome.AGENT:
            slot.state, slot.number, slot.late = "finished", attempt.number, None
        elif is_late:
            slot.late = None
        else:
            slot.release(begun=True)

    def prepare(self, attempt: Attempt, request: FinishRequest, now: float) -> None:
        slot, is_late = attempt.slot, attempt.state == "lost"
        slot.stood = (slot.state, slot.number) if is_late else None
        slot.state, slot.number = "prepared", attempt.number
        attempt.state = attempt.recorded = "prepared"
        attempt.finish, attempt.prepared_at, attempt.has_place = request, now, not is_late

    def commit(self, attempt: Attempt) -> None:
        attempt.state = attempt.recorded = attempt.slot.state = "finished"
        attempt.slot.late = attempt.slot.stood = None

    def undo(self, attempt: Attempt) -> None:
        """A lost attempt used up its try when it was lost."""
        slot = attempt.slot
        attempt.state = attempt.recorded = "aborted"
        attempt.finish = None
        if slot.stood is None:
            slot.release(begun=True)
            return
        (stood, number), slot.stood, slot.late = slot.stood, None, None
        slot.state = "given_up" if stood == "given_up" else "free"
        slot.number = number + (slot.state == "free")

    def overdue(self, now: float) -> list[Attempt]:
        """Prepared attempts that this server decides about, and nobody decided in time."""
        prepared = [a for a in self.attempts if a.state == "prepared" and decides_here(a)]
        return [a for a in prepared if now - a.prepared_at >= DOUBT_S]

    def reap(self, now: float) -> None:
        for lease_id, (slot, number, expires) in tuple(self.leases.items()):
            if expires < now:
                del self.leases[lease_id]
                self.give_back(slot, number)
        for attempt in self.attempts:
            if attempt.state == "tentative" and attempt.seen + TRIAL_S < now:
                self.withdraw(attempt)
            if attempt.state != "open":
                continue
            limit = min(IDLE_S, HEARTBEAT_S * (2 if attempt.unheard else 4)) if attempt.beats else IDLE_S
            if now - attempt.seen > limit:
                self.silence(attempt)

    def silence(self, attempt: Attempt) -> None:
        if attempt.unheard:  # its client did not come back after a restart
            attempt.state, attempt.recorded = "aborted", "interrupted"
            attempt.slot.release(begun=True, uses_up=False)
        else:
            attempt.state = attempt.recorded = "lost"
            attempt.slot.late = attempt
            attempt.slot.release(begun=True)

    def give_back(self, slot: Slot, number: int) -> None:
        if self.may_begin(slot, number):
            slot.release(begun=False)

    def withdraw(self, attempt: Attempt) -> None:
        attempt.state = "aborted"
        self.give_back(attempt.slot, attempt.number)

    def restart(self, now: float) -> None:
        """What the ledger knows goes on."""
        self.leases.clear()
        for group in self.groups.values():
            group.opened = now
            for slot in group.slots:
                self._restart_slot(slot, now)
        for attempt in self.attempts:
            attempt.is_known = attempt.state in ("open", "lost", "prepared") and attempt.is_known
            attempt.is_answered = False
            if not attempt.recorded:
                attempt.state, attempt.is_known = "gone", False

    def _restart_slot(self, slot: Slot, now: float) -> None:
        for attempt in slot.begun[:-1]:
            attempt.state = "finished" if attempt.recorded == "finished" else "superseded"
        if not slot.group.is_open:
            for attempt in slot.begun[-1:]:
                attempt.state = "finished" if attempt.recorded == "finished" else "aborted"
            return
        newest = slot.begun[-1] if slot.begun else None
        slot.late, slot.number = None, (newest.number + 1 if newest is not None else 1)
        slot.state = "given_up" if slot.failures >= slot.group.max_attempts else "free"
        slot.number -= slot.state == "given_up"
        if newest is None:
            return
        match newest.recorded:
            case "running":
                slot.state, slot.number = "running", newest.number
                newest.state, newest.seen, newest.unheard = "open", now, True
                newest.beats = newest.begin.heartbeats
            case "prepared":
                slot.failures -= slot.stood is not None  # as if it had not been lost
                slot.state, slot.number, slot.stood = "prepared", newest.number, None
                newest.state, newest.prepared_at, newest.has_place = "prepared", now, True
            case "lost":
                newest.state, slot.late = "lost", newest
            case "finished":
                newest.state = "finished"
                if newest.finish is not None and newest.finish.outcome is Outcome.AGENT:
                    slot.state, slot.number = "finished", newest.number
            case _:
                newest.state = "aborted"
