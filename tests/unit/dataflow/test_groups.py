"""Groups: slots, attempts, late finishes and closing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import ConflictError, EpisodeClosed, NotFoundError
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.groups import TRANSITIONS, GroupBook, ReleaseReason, RestoredSlot, SlotEvent, SlotState


def begin_one(book, group_id="g"):
    ticket = book.take(group_id)
    book.begin(ticket.episode_id, ticket.attempt)
    return ticket


def test_group_closes_when_all_members_finished(open_book, make):
    book = open_book()
    assert book.open_group(make.spec(size=2)) == ("g-0", "g-1")
    for reward in (0.0, 1.0):
        ticket = begin_one(book)
        assert book.closed() == ()
        record = make.record(ticket.episode_id, reward=reward)
        assert book.finish(ticket.episode_id, 1, record) is SlotState.FINISHED
    (closed,) = book.closed()
    assert [r.rewards["solver"] for r in closed.finished] == [0.0, 1.0]
    assert closed.drop_reason is None and closed.given_up == closed.cut_off == ()
    ready = closed.ready("solver")
    assert ready is not None and len(ready.members) == 2 and closed.ready("other") is None
    assert book.closed() == () and book.counts().num_groups == 0


def test_reserved_slots_are_exactly_the_size(open_book, make):
    book = open_book()
    book.open_group(make.spec(size=2))
    book.open_group(make.spec("h", size=1))
    assert [g.id for g in book.groups_with_free_slots()] == ["g", "h"]
    assert {book.take("g").episode_id, book.take("g").episode_id} == {"g-0", "g-1"}
    assert [g.id for g in book.groups_with_free_slots()] == ["h"]
    with pytest.raises(ConflictError, match="no free slot"):
        book.take("g")
    with pytest.raises(NotFoundError):
        book.take("unknown")


@pytest.mark.parametrize("reason", [ReleaseReason.LOST, ReleaseReason.ABORTED, ReleaseReason.FAILED])
def test_slot_reopens_with_the_same_episode_and_the_next_attempt(open_book, make, reason):
    book = open_book()
    book.open_group(make.spec(size=1))
    first = begin_one(book)
    assert book.release(first.episode_id, 1, reason) is SlotState.FREE
    second = book.take("g")
    assert (second.episode_id, second.attempt) == (first.episode_id, 2)


def test_slot_is_given_up_after_max_attempts_and_an_empty_group_is_dropped(open_book, make):
    book = open_book(max_attempts=2)
    book.open_group(make.spec(size=1))
    begin_one(book)
    book.release("g-0", 1, ReleaseReason.LOST)
    begin_one(book)
    assert book.release("g-0", 2, ReleaseReason.ABORTED) is SlotState.GIVEN_UP
    (closed,) = book.closed()
    assert closed.drop_reason == "none of 1 episodes finished: aborted"
    assert [(m.episode_id, m.attempt) for m in closed.given_up] == [("g-0", 2)]


def test_expired_leases_use_up_no_attempt(open_book, make):
    book = open_book(max_attempts=1)
    book.open_group(make.spec(size=1))
    for attempt in range(1, 6):
        assert book.take("g").attempt == attempt
        assert book.release("g-0", attempt, ReleaseReason.LEASE_EXPIRED) is SlotState.FREE
    assert begin_one(book).attempt == 6
    with pytest.raises(ConflictError, match="attempt 6 is current"):
        book.release("g-0", 1, ReleaseReason.LOST)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.AGENT])
def test_failed_outcomes_never_become_members(open_book, make, outcome):
    book = open_book(max_attempts=2)
    book.open_group(make.spec(size=1))
    begin_one(book)
    assert book.finish("g-0", 1, make.record(outcome=outcome)) is SlotState.FREE
    with pytest.raises(EpisodeClosed):
        book.finish("g-0", 1, make.record())
    begin_one(book)
    assert book.finish("g-0", 2, make.record(attempt=2, outcome=outcome)) is SlotState.GIVEN_UP
    assert book.closed()[0].finished == ()


def test_late_finish_counts_until_a_successor_has_begun(open_book, make):
    book = open_book()
    book.open_group(make.spec(size=1))
    begin_one(book)
    book.release("g-0", 1, ReleaseReason.LOST)
    ticket = book.take("g")
    assert book.finish("g-0", 1, make.record()) is SlotState.FINISHED
    with pytest.raises(ConflictError):
        book.begin("g-0", ticket.attempt)
    assert book.closed()[0].finished[0].attempt == 1


def test_late_finish_after_a_successor_began_conflicts(open_book, make):
    book = open_book()
    book.open_group(make.spec(size=1))
    begin_one(book)
    book.release("g-0", 1, ReleaseReason.LOST)
    begin_one(book)
    with pytest.raises(ConflictError, match="successor attempt has begun"):
        book.finish("g-0", 1, make.record())
    book.release("g-0", 2, ReleaseReason.LOST)
    with pytest.raises(ConflictError, match="successor"):
        book.finish("g-0", 1, make.record())
    assert book.finish("g-0", 2, make.record(attempt=2)) is SlotState.FINISHED


def test_late_finish_of_the_last_attempt_counts(open_book, make):
    book = open_book(max_attempts=1)
    book.open_group(make.spec(size=2))
    begin_one(book)
    assert book.release("g-0", 1, ReleaseReason.LOST) is SlotState.GIVEN_UP
    assert book.finish("g-0", 1, make.record()) is SlotState.FINISHED


def test_late_failure_changes_nothing_and_uses_up_no_second_attempt(open_book, make):
    book = open_book(max_attempts=2)
    book.open_group(make.spec(size=1))
    begin_one(book)
    book.release("g-0", 1, ReleaseReason.LOST)
    assert book.finish("g-0", 1, make.record(outcome=Outcome.ENVIRONMENT)) is SlotState.FREE
    assert begin_one(book).attempt == 2


def test_finish_after_abort_or_finish_or_before_begin_is_refused(open_book, make):
    book = open_book()
    book.open_group(make.spec(size=3))
    begin_one(book)
    book.release("g-0", 1, ReleaseReason.ABORTED)
    with pytest.raises(EpisodeClosed, match="aborted"):
        book.finish("g-0", 1, make.record())
    book.take("g")
    with pytest.raises(ConflictError, match="it never began"):
        book.finish("g-0", 2, make.record(attempt=2))
    ticket = begin_one(book)
    book.finish(ticket.episode_id, 1, make.record(ticket.episode_id))
    with pytest.raises(EpisodeClosed, match="finished"):
        book.finish(ticket.episode_id, 1, make.record(ticket.episode_id))


def test_deadline_cuts_off_what_is_above_the_floor(open_book, make, clock):
    book = open_book(group_floor=2)
    book.open_group(make.spec(size=4))
    tickets = [begin_one(book) for _ in range(3)]
    book.finish("g-0", 1, make.record("g-0"))
    clock.now = 60.0
    assert book.closed() == ()
    book.finish("g-1", 1, make.record("g-1"))
    (closed,) = book.closed()
    assert [r.episode_id for r in closed.finished] == ["g-0", "g-1"]
    assert [m.episode_id for m in closed.cut_off] == [tickets[2].episode_id, "g-3"]
    assert [m.reason for m in closed.cut_off] == ["running at the deadline", "free at the deadline"]
    with pytest.raises(EpisodeClosed, match="no open group"):
        book.finish("g-2", 1, make.record("g-2"))


def test_without_a_floor_the_deadline_cuts_nothing(open_book, make, clock):
    book = open_book()
    book.open_group(make.spec(size=2))
    begin_one(book)
    book.finish("g-0", 1, make.record())
    clock.now = 1e6
    assert book.closed() == ()


def test_evaluation_groups_are_never_cut(open_book, make, clock):
    book = open_book(group_floor=1)
    book.open_group(make.spec(size=2, split=Split.EVAL))
    begin_one(book)
    book.finish("g-0", 1, make.record())
    clock.now = 1e6
    assert book.closed() == ()


def test_floors_and_counts_tell_training_from_evaluation(open_book, make):
    book = open_book()
    book.open_group(make.spec("a", size=2, floor=3))
    book.open_group(make.spec("b", size=1, floor=5))
    book.open_group(make.spec("e", size=4, split=Split.EVAL))
    begin_one(book, "a")
    assert book.floors("solver") == [3, 5] and book.floors("other") == []
    train = book.counts(Split.TRAIN)
    assert (train.num_groups, train.slots[SlotState.RUNNING], train.slots[SlotState.FREE]) == (2, 1, 2)
    assert book.counts().slots[SlotState.FREE] == 6
    assert [(spec.id, n) for spec, n in book.progress()] == [("a", 0), ("b", 0), ("e", 0)]
    assert book.state_of("a-0") == (SlotState.RUNNING, 1)


def test_ids_must_be_new_and_as_many_as_the_size(open_book, make):
    book = open_book()
    book.open_group(make.spec(size=2))
    with pytest.raises(ConflictError, match="open already"):
        book.open_group(make.spec(size=2))
    with pytest.raises(ConflictError, match="unique"):
        book.open_group(make.spec("h", size=1), episode_ids=["g-0"])
    with pytest.raises(ValueError, match="expected 2"):
        book.open_group(make.spec("h", size=2), episode_ids=["x"])


def test_restored_slots_continue_where_they_stood(open_book, make):
    book = open_book(max_attempts=2)
    slots = [
        RestoredSlot("a", next_attempt=2, record=make.record("a")),
        RestoredSlot("b", next_attempt=3, num_failures=1),
        RestoredSlot("c", next_attempt=3, num_failures=2),
    ]
    book.restore(make.spec(size=3), slots=slots)
    assert [book.state_of(i)[0] for i in "abc"] == [SlotState.FINISHED, SlotState.FREE, SlotState.GIVEN_UP]
    ticket = begin_one(book)
    assert (ticket.episode_id, ticket.attempt) == ("b", 3)
    assert book.release("b", 3, ReleaseReason.LOST) is SlotState.GIVEN_UP
    (closed,) = book.closed()
    assert [r.episode_id for r in closed.finished] == ["a"] and len(closed.given_up) == 2


def test_finished_is_final_and_terminal_states_stay_terminal():
    assert not [event for (state, event) in TRANSITIONS if state is SlotState.FINISHED]
    given_up = [event for (state, event) in TRANSITIONS if state is SlotState.GIVEN_UP]
    assert given_up == [SlotEvent.FINISH, SlotEvent.PREPARE]


ACTIONS = st.sampled_from(["take", "begin", "finish", "fail", *ReleaseReason])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 2), st.integers(1, 5)), max_size=60))
def test_any_sequence_of_events_counts_each_episode_at_most_once(make, steps):
    book = GroupBook(max_attempts=2, group_floor=None, group_deadline_s=60.0, clock=lambda: 0.0)
    book.open_group(make.spec(size=3))
    begun: dict[str, int] = {}
    counted: dict[str, int] = {}
    for action, index, attempt in steps:
        episode_id = f"g-{index}"
        try:
            if action == "take":
                book.take("g")
            elif action == "begin":
                book.begin(episode_id, attempt)
                assert attempt > begun.get(episode_id, 0) and episode_id not in counted
                begun[episode_id] = attempt
            elif action in ("finish", "fail"):
                outcome = Outcome.AGENT if action == "finish" else Outcome.CLIENT
                state = book.finish(episode_id, attempt, make.record(episode_id, attempt, outcome=outcome))
                assert attempt == begun[episode_id]
                if action == "finish":
                    assert state is SlotState.FINISHED and episode_id not in counted
                    counted[episode_id] = attempt
            else:
                book.release(episode_id, attempt, ReleaseReason(action))
                assert episode_id not in counted
        except ConflictError:
            continue
    for closed in book.closed():
        assert {r.episode_id: r.attempt for r in closed.finished} == counted
        assert len(closed.finished) + len(closed.given_up) == 3


def test_after_a_rollback_nothing_is_newer_than_the_last_version_that_survives(open_book, make):
    book = open_book()
    book.open_group(make.spec("new", size=2, floor=5))
    book.open_group(make.spec("old", size=1, floor=2))
    ticket = begin_one(book, "new")
    book.finish(ticket.episode_id, 1, make.record(ticket.episode_id, group_id="new", versions=(3, 5)))
    book.rebase("other", highest=0)
    assert book.floors("solver") == [5, 2]
    book.rebase("solver", highest=4)
    assert book.floors("solver") == [4, 2]
    second = begin_one(book, "new")
    book.finish(second.episode_id, 1, make.record(second.episode_id, group_id="new", versions=(6,)))
    (closed,) = book.closed()
    ready = closed.ready("solver")
    assert ready.floor_version == 4
    assert [m.samples[0].versions_T[1:].tolist() for m in ready.members] == [[3, 4], [6]]
