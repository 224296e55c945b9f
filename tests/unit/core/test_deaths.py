"""How often what is kept running may die."""

from __future__ import annotations

from wingbeat.core.deaths import BACKOFF_S, MAX_SLOW_DEATHS, Deaths


def deaths_at(*times: float, by_signal: bool = False) -> Deaths:
    clock = iter(times)
    deaths = Deaths(lambda: next(clock))
    for _ in times:
        deaths.count(by_signal=by_signal)
    return deaths


def test_pauses_grow_with_each_death_and_begin_anew_after_a_long_life() -> None:
    times = (0.0, 1.0, 3.0, 6.0, 9.0)
    assert [deaths_at(*times[: n + 1]).pause_s for n in range(5)] == list(BACKOFF_S)
    assert not deaths_at(*times).are_too_many
    assert deaths_at(*times, 119.0, by_signal=True).are_too_many
    assert deaths_at(*times, 119.0).are_too_many and not deaths_at(*times, 120.0).are_too_many
    assert deaths_at(*times, 200.0).pause_s == 0.0


def test_what_dies_slowly_is_given_up_too() -> None:
    """As a model that loads for two minutes, and then does not fit."""
    every_150_s = [150.0 * n for n in range(MAX_SLOW_DEATHS)]
    assert not deaths_at(*every_150_s[:-1]).are_too_many
    slow = deaths_at(*every_150_s)
    assert slow.are_too_many and slow.words() == "20 times within 60 minutes"
    assert not deaths_at(*(200.0 * n for n in range(100))).are_too_many
    assert not deaths_at(*(30.0 * n for n in range(100)), by_signal=True).are_too_many, "somebody tests it"
