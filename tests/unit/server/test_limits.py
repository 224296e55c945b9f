"""What one client may hold, and what happens beyond it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.config.limits import LimitsConfig
from wingbeat.core.config.load import validate_config
from wingbeat.core.errors import ConfigError, LimitReached, RequestError
from wingbeat.server.limits import MAX_BUCKETS, Limits, Quota, Rate
from wingbeat.server.metrics import ControlMetrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def quota(*, limit: int = 4, total: int | None = None, refused: list[str] | None = None) -> Quota:
    told = [] if refused is None else refused
    return Quota("calls", "model calls", limit=limit, total=total, refused=told.append, help="wait")


def test_a_refusal_names_limit_client_and_number() -> None:
    refused: list[str] = []
    calls = quota(limit=2, refused=refused)
    calls.take("shop", 2)
    with pytest.raises(LimitReached) as error:
        calls.take("shop")
    assert error.value.status == 429 and error.value.code == "limit_reached" and error.value.retry_after_s == 1.0
    assert error.value.message == "client 'shop' has 2 of 2 model calls (limits.calls): wait"
    assert refused == ["calls"]
    calls.take("other")
    calls.give("shop")
    calls.take("shop")
    assert (calls.held("shop"), calls.held("other"), calls.num_held) == (2, 1, 3)


def test_a_used_up_total_still_serves_who_has_less_than_a_share() -> None:
    calls = quota(limit=10, total=10)
    calls.take("greedy", 10)
    calls.take("late", 5)  # half of the total: its share of two
    with pytest.raises(LimitReached, match=r"all clients together have 15 of 10 model calls \(limits\.total_calls\)"):
        calls.take("late")
    with pytest.raises(LimitReached):
        calls.take("greedy")


def test_any_number_of_names_together_take_twice_the_total_and_no_more() -> None:
    calls = quota(limit=10, total=20)
    for number in range(1000):
        with contextlib.suppress(LimitReached):
            for _ in range(10):
                calls.take(f"name-{number}")
    assert calls.num_held == 40


def test_what_nobody_may_have_is_refused_for_good() -> None:
    with pytest.raises(RequestError, match=r"takes 5 model calls, and one client may have 4 \(limits\.calls\)"):
        quota(limit=4).take("shop", 5)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 6), st.booleans()), max_size=200))
def test_quotas_hold_and_nothing_is_lost(steps: list[tuple[str, int, bool]]) -> None:
    calls, held = quota(limit=8, total=16), dict.fromkeys("abcde", 0)
    for client, count, gives in steps:
        if gives and held[client] >= count:
            calls.give(client, count)
            held[client] -= count
            continue
        try:
            calls.take(client, count)
        except LimitReached:
            num_clients = sum(map(bool, held.values())) + (not held[client])
            assert held[client] + count > min(8, 16 // num_clients)  # never refused within its share
        else:
            held[client] += count
        assert all(count <= 8 for count in held.values())
        assert calls.num_held == sum(held.values()) <= 2 * 16
    assert all(calls.held(client) == count for client, count in held.items())


def test_a_bucket_fills_with_time_and_a_big_request_is_paid_back() -> None:
    clock = Clock()
    rate = Rate(per_s=10, burst=5, clock=clock, refused=lambda name: None)
    for _ in range(5):
        rate.spend("a")
    with pytest.raises(LimitReached, match=r"sends more than 10 requests per second") as error:
        rate.spend("a")
    assert error.value.retry_after_s == pytest.approx(0.1)
    rate.spend("b")
    clock.now += 0.11
    rate.spend("a", 21)  # one is there, twenty are owed
    clock.now += 2.0
    with pytest.raises(LimitReached):
        rate.spend("a")
    clock.now += 0.2
    rate.spend("a")


def test_buckets_of_many_clients_stay_few() -> None:
    clock = Clock()
    rate = Rate(per_s=1, burst=5, clock=clock, refused=lambda name: None)
    for number in range(5 * MAX_BUCKETS):
        rate.spend(f"client-{number}")
    assert len(rate._buckets) <= MAX_BUCKETS


def test_refusals_are_counted_by_limit() -> None:
    metrics = ControlMetrics()
    limits = Limits(LimitsConfig(calls=1), metrics=metrics, clock=Clock())
    limits.calls.take("a")
    with pytest.raises(LimitReached):
        limits.calls.take("a")
    assert b'wingbeat_refused_total{limit="calls"} 1.0' in metrics.render()


def test_a_total_below_one_clients_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="total_calls"):
        validate_config({"policies": {"p": {"model": "m"}}, "limits": {"calls": 10, "total_calls": 5}})
