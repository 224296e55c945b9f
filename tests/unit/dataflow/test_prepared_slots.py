"""Slots whose finish waits for a transaction: nothing moves them, and an abort puts them back where they stood."""

from __future__ import annotations

import pytest

from wingbeat.core.errors import ConflictError, EpisodeClosed
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.groups import GroupBook, ReleaseReason, SlotState
from wingbeat.dataflow.records import EpisodeRecord, GroupSpec


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(*, size: int = 2, max_attempts: int = 2, floor: int | None = 1) -> tuple[GroupBook, Clock]:
    clock = Clock()
    book = GroupBook(max_attempts=max_attempts, group_floor=floor, group_deadline_s=10, clock=clock)
    spec = GroupSpec("g", Task("s", "1"), Split.TRAIN, size=size, policies=("p",), floor_version={"p": 0})
    book.open_group(spec, episode_ids=["a", "b"][:size])
    return book, clock


def record(episode_id: str, attempt: int = 1) -> EpisodeRecord:
    return EpisodeRecord(episode_id, attempt, "g", outcome=Outcome.AGENT, finish_digest="d")


def running(book: GroupBook) -> tuple[str, int]:
    ticket = book.take("g")
    book.begin(ticket.episode_id, ticket.attempt)
    return ticket.episode_id, ticket.attempt


def test_a_group_waits_for_its_prepared_member_beyond_its_deadline() -> None:
    book, clock = opened()
    running(book)
    running(book)
    book.finish("a", 1, record("a"))
    book.prepare("b", 1, record("b"))
    clock.now = 1000
    assert book.closed() == () and not book.abandon("g")
    with pytest.raises(ConflictError, match="only its transaction ends it"):
        book.release("b", 1, ReleaseReason.LOST)
    with pytest.raises(ConflictError, match="no free slot"):
        book.take("g")
    with pytest.raises(ConflictError, match="prepared already"):
        book.prepare("b", 1, record("b"))


def test_commit_and_undo() -> None:
    book, _ = opened()
    running(book)
    running(book)
    book.prepare("a", 1, record("a"))
    assert book.prepared_record("a") == record("a")
    assert book.finish("a", 1, book.prepared_record("a")) is SlotState.FINISHED
    with pytest.raises(ConflictError, match="not prepared: the slot is finished"):
        book.undo("a", 1)
    book.prepare("b", 1, record("b"))
    with pytest.raises(ConflictError, match="not prepared"):
        book.undo("b", 2)
    assert book.undo("b", 1) is SlotState.FREE
    with pytest.raises(ConflictError, match="not prepared"):
        book.prepared_record("b")
    assert running(book) == ("b", 2)
    book.prepare("b", 2, record("b", 2))
    assert book.undo("b", 2) is SlotState.GIVEN_UP  # max_attempts
    (closed,) = book.closed()
    assert [r.episode_id for r in closed.finished] == ["a"] and len(closed.given_up) == 1


@pytest.mark.parametrize("max_attempts", [1, 2], ids=["given-up", "free"])
def test_a_lost_attempt_that_is_prepared_and_undone_has_used_up_one_try(max_attempts: int) -> None:
    book, _ = opened(size=1, max_attempts=max_attempts)
    assert running(book) == ("a", 1)
    stood = book.release("a", 1, ReleaseReason.LOST)
    book.prepare("a", 1, record("a"))
    assert book.state_of("a") == (SlotState.PREPARED, 1)
    assert book.undo("a", 1) is stood
    with pytest.raises(EpisodeClosed):  # its late finish does not count any more
        book.finish("a", 1, record("a"))
    if max_attempts == 2:
        assert running(book) == ("a", 3)  # 2 might have been leased when it came
        assert book.release("a", 3, ReleaseReason.ABORTED) is SlotState.GIVEN_UP


def test_a_lease_of_the_successor_that_was_out_meanwhile_is_void() -> None:
    book, _ = opened(size=1, max_attempts=3)
    running(book)
    book.release("a", 1, ReleaseReason.LOST)
    ticket = book.take("g")
    book.prepare("a", 1, record("a"))
    with pytest.raises(ConflictError):
        book.begin("a", ticket.attempt)
    book.undo("a", 1)
    other = book.take("g")
    assert other.attempt > ticket.attempt
    with pytest.raises(ConflictError):  # it lapses, and must not take the other's slot
        book.release("a", ticket.attempt, ReleaseReason.LEASE_EXPIRED)
    book.begin("a", other.attempt)
