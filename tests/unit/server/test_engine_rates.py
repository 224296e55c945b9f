"""Which engine a generation goes to, by measured rates: closed loops on a clock of their own."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.server.workers.rates import HALF_LIFE_S, RateMeter, least_wait, rates, room_shares

TOKENS = 100


@dataclass
class Played:
    """Per engine: when its generations began, and how many ran at a time on average in the second half."""

    began: list[list[float]]
    held: list[float]

    @property
    def shares(self) -> list[float]:
        return [one / sum(self.held) for one in self.held]


def play(speeds: Sequence[float], *, running: int, ended: int, joins: int = 0) -> Played:
    """Keep ``running`` generations going on engines that sample each at ``speeds`` tokens per second.

    ``joins``: the last engine is there from that generation on.
    """
    meters = [RateMeter() for _ in speeds]
    counts, played = [0] * len(speeds), Played([[] for _ in speeds], [0.0] * len(speeds))
    heap: list[tuple[float, int, float]] = []
    now = 0.0
    for number in range(ended + running):
        if number >= running:
            before = now
            now, engine, start = heapq.heappop(heap)
            if number > ended // 2:
                played.held = [h + c * (now - before) for h, c in zip(played.held, counts, strict=True)]
            counts[engine] -= 1
            meters[engine].record(TOKENS, now - start, now_s=now)
        there = [number >= joins or i < len(speeds) - 1 for i in range(len(speeds))]
        chosen = least_wait(counts, rates(meters, now_s=now), there)
        assert chosen is not None
        counts[chosen] += 1
        played.began[chosen].append(now)
        heapq.heappush(heap, (now + TOKENS / speeds[chosen], chosen, now))
    return played


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(10.0, 100.0), min_size=2, max_size=4))
def test_engines_run_numbers_in_proportion_to_their_rates(speeds: list[float]) -> None:
    played = play(speeds, running=20 * len(speeds), ended=800 * len(speeds))
    for share, speed in zip(played.shares, speeds, strict=True):
        assert share == pytest.approx(speed / sum(speeds), rel=0.25, abs=0.02)


@settings(max_examples=4, deadline=None)
@given(st.floats(1.0, 100.0), st.integers(4, 6))
def test_none_is_forgotten_for_good(speed: float, running: int) -> None:
    """However slow it was and however little there is to do: its measure fades, and it is tried again."""
    slow = play([100.0, speed], running=running, ended=700 * running).began[1]
    assert len(slow) > 2 and slow[-1] > 60.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=6), st.floats(0.1, 1e4))
def test_engines_of_equal_rates_are_taken_by_their_numbers(state: list[tuple[int, bool]], rate: float) -> None:
    counts, able = [count for count, _ in state], [is_able for _, is_able in state]
    chosen = least_wait(counts, [rate] * len(state), able)
    wanted = [i for i, is_able in enumerate(able) if is_able and counts[i] == min(c for c, a in state if a)]
    assert chosen == (wanted[0] if wanted else None)


def test_one_that_just_joined_is_taken_for_the_median() -> None:
    meters = [RateMeter() for _ in range(4)]
    for meter, tokens in zip(meters, (10, 40, 100), strict=False):
        meter.record(tokens, 1.0, now_s=5.0)
    assert rates(meters, now_s=5.0) == [25.0, 40.0, 70.0, 40.0]
    assert play([50.0, 50.0, 50.0], running=60, ended=900, joins=300).shares[2] == pytest.approx(1 / 3, abs=0.05)
    assert rates([RateMeter(), RateMeter()], now_s=9.0) == [1.0, 1.0]


def test_a_measure_fades_to_the_median() -> None:
    slow, fast, other = RateMeter(), RateMeter(), RateMeter()
    slow.record(60, 60.0, now_s=0.0)
    fast.record(6000, 60.0, now_s=0.0)
    other.record(6000, 60.0, now_s=0.0)
    found = [rates([slow, fast, other], now_s=HALF_LIFE_S * lives)[0] for lives in (0, 6, 20)]
    assert found[0] < 3 and 30 < found[1] < 80 and found[2] > 99


def test_one_that_stalls_gets_no_more_than_its_share() -> None:
    """Nothing ends there, so nothing is measured: its number alone has to hold it back."""
    meters = [RateMeter(), RateMeter()]
    for meter in meters:
        meter.record(1000, 10.0, now_s=0.0)
    counts = [8, 8]
    for _ in range(100):  # those of the first end, the second stands still
        counts[0] -= 1
        meters[0].record(100, 1.0, now_s=1.0)
        chosen = least_wait(counts, rates(meters, now_s=1.0), [True, True])
        assert chosen is not None
        counts[chosen] += 1
    assert counts == [8, 8]


def test_a_full_pool_gives_little_to_one_that_is_far_slower() -> None:
    assert room_shares([100.0, 60.0, 50.0, 10.0]) == [1.0, 1.0, 1.0, 0.2]
    assert room_shares([]) == []


def test_a_measure_that_has_faded_away_is_none() -> None:
    """Rates of an engine that rested for a day: the very last digits of a number divide no more."""
    for half_lives in range(1060, 1100):
        meter = RateMeter()
        meter.record(100_000, 100.0, now_s=0.0)
        meter.rate(median=1.0, now_s=HALF_LIFE_S * half_lives)
        assert meter.measured is None and rates([meter], now_s=HALF_LIFE_S * half_lives) == [1.0]
