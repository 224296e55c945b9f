"""Backoff: bounded, jittered, inside its budget."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.client.retry import RetryPolicy


@given(attempt=st.integers(0, 500), seed=st.integers())
def test_delays_grow_to_the_cap_and_are_jittered(attempt: int, seed: int) -> None:
    policy = RetryPolicy(budget_s=None, base_s=0.1, cap_s=5.0)
    delay = policy.delay_s(attempt, elapsed_s=1e9, retry_after_s=None, rng=random.Random(seed))
    ceiling = min(5.0, 0.1 * 2 ** min(attempt, 16))
    assert delay is not None
    assert 0 <= delay <= ceiling


@given(asked=st.floats(0, 1000), seed=st.integers())
def test_retry_after_is_a_floor(asked: float, seed: int) -> None:
    delay = RetryPolicy(budget_s=None).delay_s(0, elapsed_s=0, retry_after_s=asked, rng=random.Random(seed))
    assert delay is not None
    assert asked <= delay <= 1.25 * asked


def test_no_try_begins_beyond_the_budget() -> None:
    policy = RetryPolicy(budget_s=10.0)
    rng = random.Random(0)
    assert policy.delay_s(3, elapsed_s=9.9, retry_after_s=None, rng=rng) is None
    assert policy.delay_s(0, elapsed_s=0.0, retry_after_s=11.0, rng=rng) is None
    assert policy.delay_s(0, elapsed_s=0.0, retry_after_s=None, rng=rng) is not None
    assert RetryPolicy(budget_s=0).delay_s(0, elapsed_s=0.0, retry_after_s=None, rng=rng) is None
