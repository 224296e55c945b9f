from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wingbeat.core.config import HealthConfig
from wingbeat.dataflow.health import HealthMonitor

FINE = {
    "mismatch_kl/on_policy": 1e-9,
    "ratio/max": 1.5,
    "entropy": 2.0,
    "reward/mean": 0.3,
    "grad_norm": 0.5,
    "trained_tokens": 1000.0,
    "excluded_tokens": 0.0,
    "batch/tokens_per_episode": 40.0,
    "staleness/max": 1.0,
    "perf/oom_retries": 0.0,
}


def monitor(dtype: str = "float32", **sections: dict[str, object]) -> HealthMonitor:
    return HealthMonitor(HealthConfig.model_validate(sections), dtype=dtype, max_staleness=1)


def began(watch: HealthMonitor, metrics: dict[str, float], *, steps: int = 1) -> list[str]:
    return [alarm.name for _ in range(steps) for alarm in watch.observe(metrics).began]


@pytest.mark.parametrize(
    ("name", "metrics", "steps"),
    [
        ("mismatch", {"mismatch_kl/on_policy": 2e-5}, 2),
        ("mismatch", {"mismatch_kl/on_policy": float("nan")}, 2),
        ("ratio", {"ratio/max": 101.0}, 3),
        ("gradient", {"grad_norm": 0.0}, 5),
        ("gradient", {"skipped_steps": 1.0}, 1),
        ("memory", {"perf/oom_retries": 2.0, "perf/micro_batch_tokens": 4096.0}, 1),
        ("tokens", {"excluded_tokens": 60.0}, 1),
        ("tokens", {"trained_tokens": 0.0}, 1),
        ("staleness", {"staleness/max": 2.0}, 1),
    ],
)
def test_an_alarm_begins_once_after_its_steps_and_ends_when_all_is_well_again(
    name: str, metrics: dict[str, float], steps: int
) -> None:
    watch = monitor()
    assert began(watch, FINE, steps=3) == []
    assert began(watch, FINE | metrics, steps=steps - 1) == []
    assert began(watch, FINE | metrics, steps=3) == [name]
    assert [alarm.name for alarm in watch.active] == [name]
    assert watch.observe(FINE).ended == (name,)
    assert watch.active == ()


def test_rounding_of_bfloat16_is_no_mismatch_but_more_is() -> None:
    assert began(monitor("bfloat16"), FINE | {"mismatch_kl/on_policy": 5e-3}, steps=4) == []
    assert began(monitor("bfloat16"), FINE | {"mismatch_kl/on_policy": 2e-2}, steps=4) == ["mismatch"]


def test_a_batch_without_on_policy_tokens_leaves_the_alarm_as_it_was() -> None:
    watch = monitor()
    unknown = {name: value for name, value in FINE.items() if name != "mismatch_kl/on_policy"}
    began(watch, FINE | {"mismatch_kl/on_policy": 1.0}, steps=2)
    assert watch.observe(unknown).ended == ()
    assert [alarm.name for alarm in watch.active] == ["mismatch"]


def test_a_mismatch_far_beyond_its_limit_sounds_at_once_as_it_may_never_be_measured_again() -> None:
    assert began(monitor(), FINE | {"mismatch_kl/on_policy": 9e-5}) == []
    assert began(monitor(), FINE | {"mismatch_kl/on_policy": 1.1e-4}) == ["mismatch"]
    assert began(monitor("bfloat16"), FINE | {"mismatch_kl/on_policy": 0.11}) == ["mismatch"]


def test_entropy_may_fall_for_a_reward_but_not_for_nothing() -> None:
    solved, collapsed = monitor(), monitor()
    for watch in (solved, collapsed):
        assert began(watch, FINE, steps=10) == []
    assert began(solved, FINE | {"entropy": 0.1, "reward/mean": 0.9}, steps=20) == []
    assert began(collapsed, FINE | {"entropy": 0.1}, steps=20) == ["entropy"]


def test_an_entropy_floor_holds_whatever_the_reward() -> None:
    watch = monitor(entropy={"floor": 0.5})
    began(watch, FINE, steps=10)
    assert began(watch, FINE | {"entropy": 0.4, "reward/mean": 0.9}, steps=20) == ["entropy"]


def test_reward_up_while_length_explodes_is_a_hint_and_either_alone_is_none() -> None:
    long = {"batch/tokens_per_episode": 130.0}
    for change, expected in (
        (long | {"reward/mean": 0.5}, ["hacking"]),
        (long | {"reward/mean": 0.2}, []),
        ({"reward/mean": 0.5}, []),
    ):
        watch = monitor()
        began(watch, FINE, steps=10)
        assert began(watch, FINE | change, steps=20) == expected


def test_stop_is_reported_with_its_reason_and_off_does_not_look() -> None:
    stops = monitor(tokens={"action": "stop"})
    stop = stops.observe(FINE | {"trained_tokens": 0.0}).stop
    assert stop is not None
    assert "trained 0 tokens" in stop.text
    off = monitor(tokens={"action": "off"})
    assert off.observe(FINE | {"trained_tokens": 0.0}).began == ()
    assert "tokens" not in off.names


@example([{"entropy": value, "reward/mean": 0.0} for value in (float("inf"), float("-inf"), 0.0, 0.0)])
@given(st.lists(st.dictionaries(st.sampled_from(sorted(FINE)), st.floats(width=32), max_size=9), max_size=60))
def test_begin_and_end_alternate_for_any_metrics(history: list[dict[str, float]]) -> None:
    watch = monitor(entropy={"window": 2}, hacking={"window": 2})
    sounding: set[str] = set()
    for metrics in history:
        report = watch.observe(metrics)
        assert not sounding & {alarm.name for alarm in report.began}
        sounding |= {alarm.name for alarm in report.began}
        assert sounding.issuperset(report.ended)
        sounding -= set(report.ended)
        assert sounding == {alarm.name for alarm in watch.active}
