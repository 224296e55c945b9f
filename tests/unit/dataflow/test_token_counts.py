"""Tokens by episode-length decile."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.samples import EpisodeSamples
from wingbeat.dataflow.token_counts import LengthDeciles, TokenCounts


def test_hundred_lengths_fill_ten_deciles():
    deciles = LengthDeciles()
    for length in range(100):
        deciles.observe(length)
    assert [deciles.of(length) for length in (0, 9, 10, 55, 89, 90, 99)] == [1, 1, 2, 6, 9, 10, 10]
    assert (deciles.of(-5), deciles.of(1000)) == (1, 10)


def test_equal_lengths_share_the_middle_decile():
    deciles = LengthDeciles()
    for length in [7] * 9 + [100]:
        deciles.observe(length)
    assert deciles.of(7) == 5  # ranks 0 to 9 of 10
    assert deciles.of(100) == 10


def test_before_any_episode_there_is_one_decile():
    assert LengthDeciles().of(12) == 1


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        LengthDeciles(0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 50))
def test_deciles_are_of_the_last_window(lengths, window, asked):
    deciles = LengthDeciles(window)
    for length in lengths:
        deciles.observe(length)
    recent = sorted(lengths[-window:])
    rank = (bisect.bisect_left(recent, asked) + bisect.bisect_right(recent, asked)) / 2
    assert deciles.of(asked) == min(int(10 * rank / len(recent)), 9) + 1


def test_an_episode_is_as_long_as_all_its_agents_together(make):
    counts = TokenCounts()
    short = [make.samples(f"s-{i}", versions=(0,)) for i in range(9)]
    long = [make.samples("l-0", agent=agent, versions=(0,) * 3) for agent in "xy"]
    counts.observe([*short, *long])
    one = long[0]
    masked = EpisodeSamples(one.episode_id, 1, "g", "solver", "x", 0.0, (), masked=3)
    counts.trained([*short[:8], masked, long[1]])
    assert counts.discarded([short[8]], "too_short") == 1
    metrics = counts.metrics()
    assert {name: value for name, value in metrics.items() if value} == {
        "tokens/trained/decile_5": 8.0,
        "tokens/trained/decile_10": 3.0,
        "tokens/masked/decile_10": 3.0,
        "tokens/discarded/too_short/decile_5": 1.0,
    }
    assert len(metrics) == 30
