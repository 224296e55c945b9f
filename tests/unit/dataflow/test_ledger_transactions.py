"""Begins that survive a restart, and finishes that count on several servers or on none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wingbeat.core.errors import ConflictError, EpisodeClosed, IdempotencyConflict
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState, SampleState
from wingbeat.dataflow.records import BeginRecord

IDS = ("g-0", "g-1")
BEGIN = BeginRecord(
    "g-0",
    1,
    "g",
    label="blue",
    client="laptop",
    code="c0de",
    idempotency_key="key-1",
    begin_digest="body",
    key_digest="first",
    policies={"solver": None, "judge": 12},
    idle_timeout_s=60.0,
    heartbeats=True,
)


@pytest.fixture
def ledger(open_ledger, make) -> Ledger:
    """A ledger with one open group ``g`` of two, of which one runs."""
    ledger = open_ledger()
    ledger.record_group(make.spec(), episode_ids=IDS)
    ledger.record_begin(BEGIN).result()
    return ledger


def prepare(ledger: Ledger, record, *, transaction_id: str = "t"):
    return ledger.prepare_finish(record, transaction_id=transaction_id, decider="https://east")


def test_a_begun_attempt_comes_back_as_it_began(ledger, open_ledger):
    ledger.add_key("g-0", 1, "second").result()
    ledger.close()
    again = open_ledger()
    (attempt,) = again.running_attempts()
    assert attempt.begin == replace(BEGIN, key_digest="second")
    assert list(attempt.begin.policies) == ["solver", "judge"], "the first is the default"
    assert (attempt.state, attempt.key_digests) == (AttemptState.RUNNING, ("first", "second"))
    assert again.begun("key-1") == attempt and again.begun("key-2") is None
    (opened,) = again.open_groups()
    assert [(slot.running, slot.next_attempt) for slot in opened.slots] == [(1, 2), (None, 1)]


def test_only_the_newest_attempt_of_an_episode_can_come_back(ledger):
    ledger.record_end("g-0", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT, cause="heartbeat_lost").result()
    assert [(a.begin.attempt, a.state) for a in ledger.running_attempts()] == [(1, AttemptState.LOST)]
    assert [slot.lost for slot in ledger.open_groups()[0].slots] == [1, None]
    ledger.record_begin(replace(BEGIN, attempt=2)).result()
    assert [(a.begin.attempt, a.state) for a in ledger.running_attempts()] == [(2, AttemptState.RUNNING)]
    told = [(a.begin.attempt, a.state, a.outcome, a.cause) for a in ledger.attempts_begun("g-0")]
    assert told == [
        (1, AttemptState.LOST, Outcome.CLIENT, "heartbeat_lost"),
        (2, AttemptState.RUNNING, None, ""),
    ]
    assert ledger.attempts_begun("?") == ()
    with pytest.raises(EpisodeClosed):
        ledger.close_group("g")
        ledger.add_key("g-0", 2, "third").result()
    assert ledger.running_attempts() == () and ledger.verify() == []


def test_a_prepared_finish_counts_once_it_is_committed(ledger, open_ledger, make):
    record = replace(make.record(), client="laptop", code="c0de", label="blue", graph=b"graph")
    assert prepare(ledger, record).result() is True
    assert prepare(ledger, record).result() is False, "a repeat"
    with pytest.raises(ConflictError, match="waits for transaction t"):
        ledger.close_group("g").result()
    with pytest.raises(ConflictError, match="waits for its transaction"):
        ledger.record_begin(replace(BEGIN, attempt=2)).result()
    with pytest.raises(EpisodeClosed, match="only its transaction"):
        ledger.record_end("g-0", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT).result()
    with pytest.raises(EpisodeClosed, match="waits for its transaction"):
        ledger.record_finish(record).result()
    with pytest.raises(IdempotencyConflict):
        prepare(ledger, make.record(digest="other")).result()
    with pytest.raises(IdempotencyConflict):
        prepare(ledger, record, transaction_id="u").result()
    assert ledger.episode("g-0")[0].samples == () and ledger.verify() == []
    ledger.close()
    again = open_ledger()
    assert again.interrupt_running().result() == 0, "it is safe from a restart"
    (doubt,) = again.in_doubt()
    assert (doubt.transaction_id, doubt.decider, doubt.record) == ("t", "https://east", record)
    assert again.decision("t") is None and again.finish_of("g-0", 1) == record
    assert again.decide("t", commit=True).result() == (("g-0", 1),)
    assert again.decide("t", commit=True).result() == (("g-0", 1),)
    with pytest.raises(ConflictError, match="decided before: commit"):
        again.decide("t", commit=False).result()
    assert prepare(again, record).result() is False and again.record_finish(record).result() is False
    assert again.in_doubt() == () and again.decision("t") is True
    again.close_group("g").result()
    assert [s.state for s in again.episode("g-0")[0].samples] == [SampleState.FINISHED]
    assert [m for g in again.unconsumed("solver") for m in g.members] == list(record.samples)
    assert again.verify() == []


def test_an_aborted_finish_leaves_nothing_and_its_slot_goes_on(ledger, make):
    prepare(ledger, make.record()).result()
    ledger.capture_turn("g-0", 1, b"turn")
    assert ledger.decide("t", commit=False).result() == (("g-0", 1),)
    (view,) = ledger.episode("g-0")
    assert (view.state, view.outcome, view.cause) == (AttemptState.ABORTED, Outcome.CLIENT, "transaction_aborted")
    assert ledger.captured_turns("g-0", 1) == () and ledger.finish_of("g-0", 1) is None
    with pytest.raises(EpisodeClosed, match="aborted"):
        prepare(ledger, make.record(), transaction_id="u").result()
    ledger.record_begin(replace(BEGIN, attempt=2)).result()
    assert ledger.record_finish(make.record(attempt=2)).result() is True
    assert ledger.verify() == []


def test_a_lost_attempt_may_prepare_late(ledger, make):
    ledger.record_end("g-0", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT)
    assert prepare(ledger, make.record()).result() is True
    assert ledger.decide("t", commit=True).result() == (("g-0", 1),)


def test_what_is_decided_takes_no_more_finishes(ledger, make):
    assert ledger.decide("t", commit=False).result() == ()
    with pytest.raises(ConflictError, match="aborted already"):
        prepare(ledger, make.record()).result()
    assert [a.state for a in ledger.running_attempts()] == [AttemptState.RUNNING]


def test_a_rollback_reaches_prepared_finishes(ledger, make):
    """Versions in their samples belong to the lineage of when they were prepared, not of the commit."""
    prepare(ledger, make.record(versions=(1, 5))).result()
    ledger.begin_lineage("solver", base_lineage=0, base_step=2, reason="lost").result()
    assert [list(s.samples[0].versions_T) for s in ledger.in_doubt()[0].record.samples] == [[-1, 1, 2]]
    ledger.decide("t", commit=True)
    ledger.close_group("g").result()
    (ready,) = ledger.unconsumed("solver")
    assert [list(m.samples[0].versions_T) for m in ready.members] == [[-1, 1, 2]]


def test_a_collected_conversation_is_a_group_of_one(ledger, make):
    group = replace(make.spec("c", size=1), floor_version={"solver": 0})
    record = make.record("c-0", group_id="c")
    assert ledger.record_collected(group, record).result() is True
    assert ledger.record_collected(group, record).result() is False
    with pytest.raises(IdempotencyConflict):
        ledger.record_collected(group, make.record("c-0", group_id="c", digest="other")).result()
    assert [g.spec.id for g in ledger.open_groups()] == ["g", "c"]
    ledger.close_group("c").result()
    assert [g.group_id for g in ledger.unconsumed("solver")] == ["c"]
    unscored = replace(make.record("d-0", group_id="d", outcome=Outcome.TIMEOUT), samples=(), rewards={})
    ledger.record_collected(make.spec("d", size=1, split=Split.EVAL), unscored, closed_because="no feedback").result()
    assert [g.spec.id for g in ledger.open_groups()] == ["g"] and ledger.verify() == []
