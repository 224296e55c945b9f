"""Random histories of leases and episodes against a small reference model: real rollouts, registry, book, finishing and
ledger; no network, a clock by hand, and a control that may be killed at any moment.

What the reference says is what people may rely on: exactly one attempt of an episode counts, no acknowledged finish
and no answered turn is lost, no slot, lease or quota leaks.  Commits of the ledger are by hand, too: a kill takes with
it what was not on disk yet, so the reference remembers where it stood then.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from episode_reference import (
    DEADLINE_S,
    DOUBT_S,
    FLOOR,
    HEARTBEAT_S,
    IDLE_S,
    LEASE_S,
    SIZE,
    TRIAL_S,
    Attempt,
    CommitsByHand,
    Group,
    Reference,
    Slot,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from wingbeat.core.config import Config
from wingbeat.core.errors import (
    AuthenticationError,
    ConflictError,
    EpisodeClosed,
    IdempotencyConflict,
    NotFoundError,
    PermissionDenied,
)
from wingbeat.core.protocol import AbortRequest, BeginRequest, FinishRequest, LeaseRequest, TransactionModel
from wingbeat.core.types import FinishReason, Outcome, Split
from wingbeat.dataflow.records import finish_digest
from wingbeat.server.episodes.begins import GOES_ON
from wingbeat.server.episodes.recovery import find_attempt
from wingbeat.tracking.messages import Message

T = TypeVar("T")
HISTORIES = 2000
STEPS = 11
BASE = "http://here/v1"
ELSEWHERE = "https://lead.example:8321"
"""No peer: it is never asked."""


# --- the machine ----------------------------------------------------------------------------------

WEIGHTS = {
    "lease": 1,
    "lease_and_begin": 2,
    "begin": 2,
    "repeat": 1,
    "confirm": 1,
    "live": 3,
    "finish": 5,
    "prepare": 2,
    "decide": 2,
    "abort": 1,
    "tick": 4,
    "restart": 2,
}
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]
SECONDS = (0.4, 1.7, 2.3, 4.4, 6.0, 11.0, 11.0, 61.0)


class Histories(RuleBasedStateMachine):
    """``make_desk`` and ``restore`` are set by the test."""

    make_desk: Any
    """Takes the attempts that a slot has, the folder and the clock."""
    restore: Any
    blank = b""
    """A ledger without a row; to make its tables takes as long as all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=SHM))
        self.loop = asyncio.new_event_loop()
        self.max_attempts = 0
        self.reference = Reference()
        self.saved: Reference | None = None
        """What is on disk, where that is less than what has happened."""
        self.keys = 0

    def teardown(self) -> None:
        try:
            if self.max_attempts:
                self.commits.flush()
                self.check_ledger()
        finally:
            if self.max_attempts:
                self.kill()
            self.loop.close()
            shutil.rmtree(self.folder)

    @initialize(max_attempts=st.integers(1, 3))
    def start(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        (self.folder / "ledger.sqlite").write_bytes(self.blank)
        self.real = self.make_desk(max_attempts, self.folder, None)
        self.lease_and_begin(2, beats=bool(max_attempts % 2))

    # --- helpers

    @property
    def commits(self) -> CommitsByHand:
        return self.real.ledger._commits

    @property
    def now(self) -> float:
        return self.real.clock.now

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Whoever waits for the disk gets it."""

        async def drive() -> T:
            task = asyncio.ensure_future(work)
            while not task.done():
                for _ in range(8):
                    await asyncio.sleep(0)
                if not task.done() and self.commits.jobs:
                    self.flush()
            return await task

        return self.loop.run_until_complete(drive())

    def flush(self) -> None:
        self.commits.flush()
        self.saved = None

    def kill(self) -> None:
        close_as_a_kill_does(self.real)
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def remember(self, durable: bool) -> None:
        """A kill after a rule that waits for nothing brings this back."""
        if self.saved is None and not durable:
            self.saved = copy.deepcopy(self.reference)

    def settle(self, durable: bool) -> None:
        """The end of a rule that wrote without waiting."""
        if durable or not self.commits.jobs:
            self.flush()

    def pick(self, number: int) -> Attempt:
        """Mostly one that may still do something."""
        everyone = self.reference.attempts
        alive = [a for a in everyone if a.state in ("open", "lost", "tentative", "prepared")]
        pool = alive if alive and number % 4 else everyone
        return pool[number // 4 % len(pool)]

    def held(self, attempt: Attempt, key: str = "") -> Any:
        """As a call of this key finds it."""

        async def find() -> Any:
            return find_attempt(self.real, attempt.slot.id, {"authorization": f"Bearer {key or own}"})

        attempt.keys.append(own := attempt.keys.pop(0))  # each in its turn
        episode = self.run(find())
        assert (episode.attempt, episode.state) == (attempt.number, attempt.state)
        return episode

    # --- rules

    @rule(action=st.sampled_from(ACTIONS), which=st.integers(0, 30), number=st.integers(0, 7), durable=st.booleans())
    def step(self, action: str, which: int, number: int, durable: bool) -> None:
        """One rule of many cases: so their weights are ours."""
        odd, high = bool(number & 1), bool(number & 2)
        if not self.reference.attempts and action not in ("lease", "lease_and_begin", "begin", "tick"):
            return
        match action:
            case "lease":
                self.lease(1 + number % 3, durable)
            case "lease_and_begin":
                self.lease_and_begin(1 + number % 2, beats=high)
            case "begin" if self.reference.leases:
                self.begin(which, trial=odd, beats=high)
            case "repeat":
                self.begin_again(which)
                self.wrong_keys(which, number)
            case "confirm":
                self.confirm(which)
            case "live":
                (self.call if odd else self.beat)(which)
            case "finish":
                outcome = Outcome.ENVIRONMENT if number >= 6 else Outcome.AGENT
                self.finish(which, reward=float(odd), outcome=outcome, durable=durable)
            case "prepare":
                self.prepare(which, decider="" if odd else ELSEWHERE)
            case "decide":
                self.decide(which, commit=number > 2, durable=durable)
            case "abort":
                self.abort(which, durable)
            case "tick":
                self.tick(SECONDS[number], durable)
            case "restart":
                self.restart()
            case _:
                pass

    def lease(self, count: int, durable: bool) -> None:
        self.remember(durable)
        self.keys += 1
        key = f"lease-key-{self.keys}"
        request = LeaseRequest(max_leases=count, splits=[Split.TRAIN], wait_s=0, idempotency_key=key)
        reply = self.run(self.real.rollouts.lease(request))
        assert self.run(self.real.rollouts.lease(request)) == reply, "a lost answer costs no slots"
        for lease in reply.leases:
            ticket = self.real.rollouts._leases.get(lease.lease_id).ticket
            free = [s for g in self.reference.groups.values() if g.is_open for s in g.slots if s.state == "free"]
            group = self.reference.groups.get(lease.group.id)
            if group is None:
                assert not free, "groups are filled before others start"
                group = self.reference.groups[lease.group.id] = Group(lease.group.id, self.now, self.max_attempts)
                group.slots = [Slot(f"{group.id}-{index}", group) for index in range(SIZE)]
            (slot,) = [slot for slot in group.slots if slot.id == ticket.episode_id]
            assert (slot.state, slot.number) == ("free", ticket.attempt)
            slot.state = "leased"
            self.reference.leases[lease.lease_id] = (slot, slot.number, self.now + LEASE_S)
        assert len(reply.leases) == count, "admission is wide open here"
        self.settle(durable)

    def begin(self, which: int, trial: bool, beats: bool) -> None:
        lease_id = list(self.reference.leases)[which % len(self.reference.leases)]
        slot, number, _ = self.reference.leases.pop(lease_id)
        self.keys += 1
        request = BeginRequest(
            idempotency_key=f"key-{self.keys}",
            lease_id=lease_id,
            heartbeats=beats,
            tentative_s=TRIAL_S if trial else None,
        )
        begin = self.real.rollouts.begin(request, base_url=BASE)
        if not trial and not self.reference.may_begin(slot, number):
            with pytest.raises(ConflictError):
                self.run(begin)
            return
        reply = self.run(begin)
        assert (reply.episode_id, reply.attempt) == (slot.id, number)
        attempt = Attempt(slot, number, [reply.api_key], request, "tentative", self.now, beats=beats)
        self.reference.attempts.append(attempt)
        if not trial:
            self.reference.begin(attempt)

    def lease_and_begin(self, count: int, beats: bool) -> None:
        """What a runner does."""
        self.lease(count, True)
        for _ in range(count):
            self.begin(len(self.reference.leases) - 1, trial=False, beats=beats)

    def begin_again(self, which: int) -> None:
        attempt = self.pick(which)
        begin = self.real.rollouts.begin(attempt.begin, base_url=BASE)
        if not attempt.is_known:  # ended before a restart; of an interrupted one and of a trial the lease is gone
            again = attempt.state == "gone" or attempt.recorded == "interrupted"
            with pytest.raises(NotFoundError if again else EpisodeClosed):
                self.run(begin)
            return
        if not attempt.is_answered and attempt.state not in ("open", "lost", "prepared"):
            with pytest.raises(ConflictError):
                self.run(begin)
            return
        reply = self.run(begin)
        attempt.is_answered = True
        assert (reply.episode_id, reply.attempt) == (attempt.slot.id, attempt.number)
        other = attempt.begin.model_copy(update={"label": "other"})
        with pytest.raises(IdempotencyConflict):
            self.run(self.real.rollouts.begin(other, base_url=BASE))
        if reply.api_key not in attempt.keys:
            attempt.keys.append(reply.api_key)

    def confirm(self, which: int) -> None:
        attempt, reference = self.pick(which), self.reference
        if attempt.state == "gone":
            with pytest.raises(AuthenticationError):
                self.held(attempt)
            return
        confirm = self.real.rollouts.begins.confirm(self.held(attempt))
        if attempt.state == "aborted":
            with pytest.raises(ConflictError):
                self.run(confirm)
        elif attempt.state == "tentative" and not reference.may_begin(attempt.slot, attempt.number):
            with pytest.raises(ConflictError):
                self.run(confirm)
            attempt.state = "aborted"
        else:
            self.run(confirm)
            if attempt.state == "tentative":
                reference.begin(attempt)
                attempt.seen = self.now

    def call(self, which: int) -> None:
        """A model call, as the gateway commits it."""
        attempt = self.pick(which)
        if attempt.state in ("gone", "finished", "superseded"):
            return
        episode = self.held(attempt)
        if attempt.state != "open":
            with pytest.raises(ConflictError):
                episode.require_open()
            return
        episode.require_open()
        episode.last_seen = attempt.seen = self.now
        attempt.turns, attempt.unheard = attempt.turns + 1, False
        plan = episode.graph.resolve_text(
            policy="solver", agent="", text=f"question {attempt.turns}", template=self.real.solver.template
        )
        turn = episode.graph.commit(
            plan,
            turn_id=episode.new_turn_id(),
            token_ids=np.array([5, 6], np.int32),
            logprobs=np.array([-1.0, -2.0], np.float32),
            versions=((0, 2),),
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            reply=Message("assistant", "yes"),
            text="yes",
        )
        self.real.capture(episode, turn)

    def beat(self, which: int) -> None:
        attempt = self.pick(which)
        if attempt.state not in ("open", "tentative"):
            return
        episode = self.held(attempt)
        episode.last_seen, episode.has_heartbeat = self.now, True
        attempt.beats = True
        if attempt.state == "open":
            attempt.seen, attempt.unheard = self.now, False

    def finish(self, which: int, reward: float, outcome: Outcome, durable: bool) -> None:
        attempt, request = self.pick(which), FinishRequest(rewards=reward, outcome=outcome)
        if attempt.state == "gone":
            return
        finish = self.real.finishing.finish(self.held(attempt), request)
        if attempt.finish is not None and attempt.finish != request:
            with pytest.raises(IdempotencyConflict):
                self.run(finish)
        elif attempt.finish is not None:
            assert self.run(finish).num_turns == attempt.turns
        elif not self.reference.may_finish(attempt):
            with pytest.raises(ConflictError):
                self.run(finish)
        else:
            reply = self.run(finish)
            assert reply.num_turns == attempt.turns, "no turn that was answered is lost"
            self.reference.finish(attempt, request)
            self.remember(durable)
            self.reference.settle(self.now)
            self.settle(durable)

    def prepare(self, which: int, decider: str) -> None:
        """A finish that waits for its transaction; each attempt has its own."""
        attempt = self.pick(which)
        if attempt.state == "gone":
            return
        transaction = TransactionModel(id=transaction_of(attempt), decider=decider)
        if attempt.finish is not None and attempt.finish.transaction is not None:
            transaction = attempt.finish.transaction
        request = FinishRequest(rewards=1.0, transaction=transaction)
        prepare = self.real.teams.prepare(self.held(attempt), request)
        if attempt.finish is not None and attempt.finish != request:
            with pytest.raises(IdempotencyConflict):
                self.run(prepare)
        elif attempt.finish is not None:
            assert self.run(prepare).state == attempt.state
        elif not self.reference.may_finish(attempt):
            with pytest.raises(ConflictError):
                self.run(prepare)
        else:
            assert self.run(prepare).num_turns == attempt.turns
            self.reference.prepare(attempt, request, self.now)

    def decide(self, which: int, commit: bool, durable: bool) -> None:
        """Mostly of one that is in doubt."""
        prepared = [a for a in self.reference.attempts if a.state == "prepared"]
        attempt = prepared[which % len(prepared)] if prepared else self.pick(which)
        if attempt.finish is None or attempt.finish.transaction is None:
            return
        decide = self.real.teams.decide(transaction_of(attempt), commit=commit)
        if attempt.state == "finished" and not commit:
            with pytest.raises(ConflictError):
                self.run(decide)
            return
        assert self.run(decide).state == ("committed" if commit else "aborted")
        if attempt.state == "prepared":
            (self.reference.commit if commit else self.reference.undo)(attempt)
            self.remember(durable)
            self.reference.settle(self.now)
            self.settle(durable)

    def abort(self, which: int, durable: bool) -> None:
        attempt = self.pick(which)
        if attempt.state == "gone":
            return
        self.remember(durable)
        episode = self.held(attempt)
        if attempt.state in ("finished", "superseded", "prepared"):
            with pytest.raises(ConflictError):
                self.real.finishing.abort(episode, AbortRequest())
        elif not self.real.rollouts.begins.withdraw(episode, "changed its mind"):
            self.real.finishing.abort(episode, AbortRequest())
        match attempt.state:
            case "tentative":
                self.reference.withdraw(attempt)
            case "open":
                attempt.state = attempt.recorded = "aborted"
                attempt.slot.release(begun=True)
                self.reference.settle(self.now)
            case "lost":
                attempt.state = "aborted"
                self.reference.settle(self.now)
            case _:
                pass
        self.settle(durable)

    def wrong_keys(self, which: int, other: int) -> None:
        attempt, stranger = self.pick(which), self.pick(other)
        request = BeginRequest(idempotency_key="none", lease_id="lease-none")
        with pytest.raises(NotFoundError):
            self.run(self.real.rollouts.begin(request, base_url=BASE))
        with pytest.raises(AuthenticationError):
            self.held(attempt, "wb-ep-of-nobody")
        if stranger.slot.id != attempt.slot.id:
            with pytest.raises((AuthenticationError, PermissionDenied)):
                self.held(attempt, stranger.keys[0])

    def tick(self, seconds: float, durable: bool) -> None:
        self.real.clock.now += seconds
        self.remember(durable)

        async def reap() -> None:
            self.real.rollouts.reap()
            self.real.finishing.settle()
            self.real.teams.reap()

        self.run(reap())
        self.reference.reap(self.now)
        self.reference.settle(self.now)
        for attempt in self.reference.overdue(self.now):
            self.reference.undo(attempt)
        self.reference.settle(self.now)
        self.settle(durable)

    def restart(self) -> None:
        """SIGKILL, and a new process over what is on disk."""
        turns = [attempt.turns for attempt in self.reference.attempts]
        keys = [attempt.keys for attempt in self.reference.attempts]
        clock = self.real.clock
        self.commits.jobs.clear()
        self.kill()
        self.reference, self.saved = self.saved or self.reference, None
        for attempt, count, own in zip(self.reference.attempts, turns, keys, strict=False):
            attempt.turns, attempt.keys = count, own  # neither waits for the ledger's commits
        self.real = self.make_desk(self.max_attempts, self.folder, clock)

        async def restore() -> None:
            self.restore(self.real)

        self.run(restore())
        self.flush()
        self.reference.restart(self.now)
        clock.now += 1e-3

    # --- what always holds

    @invariant()
    def agree(self) -> None:
        for write in self.real.writes:
            assert not write.done() or write.exception() is None, write.exception()
        self.real.writes.clear()
        for group in self.reference.groups.values():
            for slot in group.slots if group.is_open else ():
                assert self.real.book.state_of(slot.id) == (slot.state, slot.number), slot.id
        states = {(a.slot.id, a.number): a.state for a in self.reference.attempts}
        running = {key for key, state in states.items() if state in ("open", "tentative")}
        assert all(e.state in GOES_ON for e in self.real.registry._running.values()), "what has ended is let go"
        found = self.real.registry.open_episodes()
        assert {(e.episode_id, e.attempt) for e in found} == running
        assert [e.state for e in found] == [states[e.episode_id, e.attempt] for e in found]
        assert self.real.limits.leases.num_held == len(self.reference.leases) == self.real.rollouts.num_leased
        places = sum(a.has_place for a in self.reference.attempts if a.state == "prepared")
        assert self.real.limits.episodes.num_held == len(running) + places
        assert self.real.teams.num_in_doubt == sum(state == "prepared" for state in states.values())
        assert self.real.book.counts().num_groups == sum(g.is_open for g in self.reference.groups.values())

    def check_ledger(self) -> None:
        """Every acknowledged finish is there, and of each episode one attempt counts at most."""
        ledger = self.real.ledger
        assert ledger.verify() == []
        for group in self.reference.groups.values():
            for slot in group.slots:
                begun = {a.number: a for a in slot.begun}
                views = ledger.episode(slot.id) if begun else ()
                assert {view.attempt: view.state for view in views} == {n: a.recorded for n, a in begun.items()}
                counted = [v for v in views if v.record is not None and v.record.outcome is Outcome.AGENT]
                assert len(counted) == (slot.state == "finished")
                for view in views:
                    attempt = begun[view.attempt]
                    finish = attempt.finish if attempt.state != "prepared" else None
                    assert (view.record is None) == (finish is None)
                    if finish is not None:
                        assert view.record.finish_digest == finish_digest(finish)
                        assert view.record.num_turns == begun[view.attempt].turns


def transaction_of(attempt: Attempt) -> str:
    return f"{attempt.slot.id}-{attempt.number}".rjust(22, "t")


def close_as_a_kill_does(desk: Any) -> None:
    ledger = desk.ledger
    ledger._commits.close()
    ledger._reading.close()
    ledger._lock_file.close()
    desk.events.close()


SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.fixture
def histories(
    make_desk: Callable[..., Any], restore: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Histories]]:
    monkeypatch.setattr("wingbeat.dataflow.ledger.CommitThread", CommitsByHand)
    # Whether the file is whole is another test's question, and half of the time of a restart.
    monkeypatch.setattr("wingbeat.dataflow.ledger.check_rows", lambda db, *, is_whole: None)
    monkeypatch.setattr("wingbeat.dataflow.ledger_opening._integrity_check", lambda *_, **__: True)
    dataflow = {"group_size": SIZE, "group_floor": FLOOR, "group_deadline_s": DEADLINE_S, "groups_per_step": 1000}
    configs = {
        count: Config.model_validate(
            {
                "run": {"steps": 100_000},
                "policies": {"solver": {"model": "m"}},
                "dataflow": {**dataflow, "max_staleness": 1, "max_attempts": count},
                "server": {
                    "begin_wait_s": 0,
                    "heartbeat_s": HEARTBEAT_S,
                    "idle_timeout_s": IDLE_S,
                    "lease_s": LEASE_S,
                    "transaction_timeout_s": DOUBT_S,
                },
            }
        )
        for count in (1, 2, 3)
    }

    close_as_a_kill_does(make_desk(configs[1], tmp_path, None))

    class Machine(Histories):
        blank = (tmp_path / "ledger.sqlite").read_bytes()

    Machine.make_desk = staticmethod(lambda count, folder, clock: make_desk(configs[count], folder, clock))
    Machine.restore = staticmethod(restore)
    yield Machine


@pytest.mark.slow
def test_histories(histories: type[Histories]) -> None:
    run_state_machine_as_test(
        histories,
        settings=settings(
            max_examples=HISTORIES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
