"""The circuit breaker: closed, open, half open."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.resources.backends.breaker import TRANSITIONS, Breaker, BreakerEvent, BreakerState, advance


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock, *, max_failures: int = 3) -> Breaker:
    return Breaker(max_failures=max_failures, cool_s=10.0, clock=clock)


def test_the_table_says_all_that_can_happen() -> None:
    cannot = {pair for pair in product(BreakerState, BreakerEvent) if pair not in TRANSITIONS}
    assert cannot == {
        (BreakerState.CLOSED, BreakerEvent.COOLED),
        (BreakerState.HALF_OPEN, BreakerEvent.COOLED),
    }
    with pytest.raises(AssertionError):
        advance(BreakerState.CLOSED, BreakerEvent.COOLED)


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_count() -> None:
    one = breaker(Clock())
    for is_success in (False, False, True, False, False):
        probe = one.sent()
        (one.succeeded if is_success else one.failed)(is_probe=probe)
        assert one.may_send()
    one.failed(is_probe=one.sent())
    assert one.state is BreakerState.OPEN and not one.may_send()


def test_after_a_while_one_request_decides() -> None:
    clock = Clock()
    one = breaker(clock, max_failures=1)
    one.failed(is_probe=one.sent())
    assert one.opens_at == 10.0
    clock.now = 10.0
    assert one.may_send()
    probe = one.sent()
    assert probe and not one.may_send()
    one.failed(is_probe=probe)
    assert one.state is BreakerState.OPEN and one.opens_at == 20.0
    clock.now = 20.0
    assert one.may_send()
    one.succeeded(is_probe=one.sent())
    assert one.state is BreakerState.CLOSED


def test_a_probe_that_nobody_waits_for_makes_room_for_another() -> None:
    clock = Clock()
    one = breaker(clock, max_failures=1)
    one.failed(is_probe=one.sent())
    clock.now = 10.0
    assert one.may_send()
    one.abandoned(is_probe=one.sent())
    assert one.may_send() and one.state is BreakerState.HALF_OPEN


def test_what_was_sent_before_it_opened_decides_nothing() -> None:
    clock = Clock()
    one = breaker(clock, max_failures=1)
    late, early = one.sent(), one.sent()
    one.failed(is_probe=early)
    clock.now = 10.0
    assert one.may_send()
    probe = one.sent()
    one.succeeded(is_probe=late)
    assert one.state is BreakerState.HALF_OPEN and not one.may_send()
    one.succeeded(is_probe=probe)
    assert one.state is BreakerState.CLOSED


@given(st.lists(st.sampled_from(["send", "succeed", "fail", "abandon", "wait"]), max_size=60))
def test_whatever_happens_at_most_one_request_probes(steps: list[str]) -> None:
    clock = Clock()
    one = breaker(clock, max_failures=2)
    under_way: list[bool] = []
    for step in steps:
        if step == "wait":
            clock.now += 4.0
        elif step == "send":
            if one.may_send():
                under_way.append(one.sent())
        elif under_way:
            ended = {"succeed": one.succeeded, "fail": one.failed, "abandon": one.abandoned}[step]
            ended(is_probe=under_way.pop(0))
        assert sum(under_way) <= 1
        assert one.state is not BreakerState.OPEN or clock.now >= one.opens_at or not one.may_send()


def test_each_probe_that_fails_doubles_the_pause_and_a_success_ends_that() -> None:
    clock = Clock()
    one = Breaker(max_failures=2, cool_s=1.0, max_cool_s=3.0, clock=clock)

    def fail() -> float:
        """The pause after it."""
        one.failed(is_probe=one.sent())
        return one.opens_at - clock.now

    assert fail() == 0.0 - clock.now
    pauses: list[float] = []
    for _ in range(4):
        pauses.append(fail())
        clock.now = one.opens_at
        assert one.may_send()
    assert (pauses, one.num_failures) == ([1.0, 2.0, 3.0, 3.0], 5)
    one.succeeded(is_probe=one.sent())
    assert one.num_failures == 0
    fail()
    assert fail() == 1.0
