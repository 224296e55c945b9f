"""Which run a repeated request belongs to, and what is kept for how long."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.core.errors import IdempotencyConflict
from wingbeat.server.calls.replays import Fingerprint, ReplayBook, SeenCalls


class FakeRun:
    """A run as far as replays know it; joinable until it is let go."""

    def __init__(self, name: str, *, size: int = 1, is_orphan: bool = False, failed: bool = False) -> None:
        self.turn_ids = (name,)
        self.num_bytes = size
        self.is_orphan = is_orphan
        self.failed = failed
        self.done = True
        self.is_kept = True

    @property
    def can_be_joined(self) -> bool:
        return self.is_kept and not self.failed

    def let_go(self) -> None:
        self.is_kept = False


def seen(*runs: Any, body: bytes = b"body", key: str = "") -> SeenCalls:
    calls = SeenCalls()
    for run in runs:
        calls.add(of(body, key), run)
    return calls


def of(body: bytes = b"body", key: str = "", *, retry: bool = False, path: str = "/v1/x") -> Fingerprint:
    headers = {b"idempotency-key": key.encode(), b"x-stainless-retry-count": b"2" if retry else b"0"}
    return Fingerprint.of(path, body, headers)


def test_what_makes_a_repetition() -> None:
    run: Any = FakeRun("a")
    book, calls = ReplayBook(), seen(run)
    assert book.find(calls, of(retry=True)) == (run, ())
    for other in (of(), of(b"other", retry=True), of(retry=True, path="/v1/y"), of(key="k", retry=True)):
        assert book.find(calls, other) == (None, ())


@pytest.mark.parametrize("count", [b"", b"0", b"000", b"x", b"-1", b"0.5"])
def test_only_a_positive_count_marks_a_retry(count: bytes) -> None:
    assert not Fingerprint.of("/", b"", {b"x-stainless-retry-count": count}).is_retry
    assert Fingerprint.of("/", b"", {b"x-stainless-retry-count": b" 1 "}).is_retry


def test_a_count_of_any_length_is_read() -> None:
    assert Fingerprint.of("/", b"", {b"x-stainless-retry-count": b"9" * 5000}).is_retry


def test_an_idempotency_key_needs_no_other_mark_and_allows_no_other_body() -> None:
    run: Any = FakeRun("a")
    calls = seen(run, key="k")
    assert ReplayBook().find(calls, of(key="k")) == (run, ())
    with pytest.raises(IdempotencyConflict, match="'k' was used with another body"):
        ReplayBook().find(calls, of(b"other", key="k"))


def test_a_retry_belongs_to_the_oldest_run_whose_caller_left_else_to_the_newest() -> None:
    runs: list[Any] = [FakeRun("a"), FakeRun("b", is_orphan=True), FakeRun("c", is_orphan=True), FakeRun("d")]
    calls, book = seen(*runs), ReplayBook()
    assert book.find(calls, of(retry=True))[0] is runs[1]
    runs[1].is_orphan = False
    assert book.find(calls, of(retry=True))[0] is runs[2]
    runs[2].is_orphan = False
    assert book.find(calls, of(retry=True))[0] is runs[3]


def test_what_cannot_be_joined_is_replaced() -> None:
    failed: Any = FakeRun("a", failed=True)
    assert ReplayBook().find(seen(failed), of(retry=True)) == (None, ("a",))


def test_a_retry_of_what_failed_never_gets_the_answer_of_an_equal_request() -> None:
    answered: Any = FakeRun("a")
    failed: Any = FakeRun("b", is_orphan=True, failed=True)
    calls, book = seen(answered, failed), ReplayBook()
    assert book.find(calls, of(retry=True)) == (None, ("b",))
    again: Any = FakeRun("c")
    calls.add(of(retry=True), again)
    assert book.find(calls, of(retry=True)) == (again, ()), "once sampled anew, that is what its retries get"
    left: Any = FakeRun("d", is_orphan=True)
    calls.add(of(), FakeRun("e", is_orphan=True, failed=True))  # pyright: ignore[reportArgumentType]
    calls.add(of(), left)
    assert book.find(calls, of(retry=True)) == (left, ())


def test_answers_are_kept_within_bytes_and_number_and_the_oldest_go_first() -> None:
    runs: list[Any] = [FakeRun(str(number), size=10) for number in range(5)]
    book = ReplayBook(max_bytes=35)
    for run in runs:
        book.keep(run)
    assert [run.is_kept for run in runs] == [False, False, True, True, True]
    assert book.num_bytes == 30
    few = ReplayBook(max_answers=2)
    for run in runs[2:]:
        few.keep(run)
    assert [run.is_kept for run in runs] == [False, False, False, True, True]


def test_an_answer_larger_than_all_room_is_not_kept() -> None:
    book, run = ReplayBook(max_bytes=5), FakeRun("a", size=10)
    book.keep(run)  # pyright: ignore[reportArgumentType]
    assert (run.is_kept, book.num_bytes) == (False, 0)


def test_the_end_of_an_episode_frees_its_answers() -> None:
    mine: Any = FakeRun("a", size=10)
    other: Any = FakeRun("b", size=10)
    book, calls = ReplayBook(), seen(mine, key="k")
    book.keep(mine)
    book.keep(other)
    book.forget(calls)
    assert (mine.is_kept, other.is_kept, book.num_bytes) == (False, True, 10)
    assert book.find(calls, of(key="k", retry=True)) == (None, ())


def test_a_call_that_ends_after_its_episode_is_not_kept() -> None:
    late: Any = FakeRun("a", size=10)
    book, calls = ReplayBook(), seen(late)
    book.forget(calls)
    book.keep(late)
    assert book.num_bytes == 0


def test_a_running_call_is_never_forgotten() -> None:
    calls = SeenCalls(max_runs=2)
    runs: list[Any] = [FakeRun(str(number)) for number in range(12)]
    for number, run in enumerate(runs[:6]):
        run.done = False
        calls.add(of(key=str(number)), run)
    assert all(ReplayBook().find(calls, of(key=str(number)))[0] is run for number, run in enumerate(runs[:6]))
    for run in runs[:6]:
        run.done = True
    for number, run in enumerate(runs[6:], start=6):
        calls.add(of(key=str(number)), run)
    assert list(calls.order) == runs[10:]


def test_an_episode_remembers_a_bounded_number_of_calls() -> None:
    calls = SeenCalls(max_runs=3)
    runs: list[Any] = [FakeRun(str(number)) for number in range(6)]
    for number, run in enumerate(runs):
        calls.add(of(b"even" if number % 2 == 0 else b"odd", key=str(number)), run)
    assert list(calls.order) == runs[3:]
    assert set(calls.by_key) == {"3", "4", "5"}
    assert {len(found) for found in calls.by_digest.values()} == {1, 2}
