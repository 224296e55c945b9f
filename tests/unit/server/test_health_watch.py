"""What control does with alarms, without a process: see also the integration tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies.health import HealthWatch

pytestmark = pytest.mark.unit


class Halts:
    """The part of a ledger that remembers what alarms stopped."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}

    def record_halt(self, policy: str, *, reason: str, settings: str) -> None:
        self.known[policy] = reason, settings

    def halt_of(self, policy: str, *, settings: str) -> str:
        reason, then = self.known.get(policy, ("", ""))
        return reason if then == settings else ""


def watch(events: list[dict[str, Any]], ledger: Any = None, **health: Any) -> HealthWatch:
    config = Config.model_validate(
        {"policies": {"solver": {"model": "m"}}, "dataflow": {"max_staleness": 1}, "health": health}
    )
    log = EventLog(None, clock=lambda: 0.0)
    log.subscribe(events.append)
    ledger = Halts() if ledger is None else ledger
    return HealthWatch(config, events=log, metrics=ControlMetrics(), ledger=ledger, watch=lambda write: None)


def host(version: int, halted: list[str]) -> Any:
    return SimpleNamespace(name="solver", version=version, halt=halted.append)


def test_an_over_age_batch_stops_training() -> None:
    events: list[dict[str, Any]] = []
    halted: list[str] = []
    assert watch(events).after_step(host(1, halted), {"staleness/max": 2.0}) == {"alarm/staleness": 1.0}
    assert [event["alarm"] for event in events] == ["staleness"]
    assert "stopped by the alarm staleness" in halted[0]


def test_a_batch_that_a_restart_found_logged_may_be_older_than_the_new_bound() -> None:
    events: list[dict[str, Any]] = []
    halted: list[str] = []
    resumed = watch(events)
    assert resumed.after_step(host(8, halted), {"staleness/max": 4.0, "grad_norm": 1.0}) == {}
    assert (events, halted) == ([], [])
    assert resumed.after_step(host(9, halted), {"staleness/max": 2.0}) == {"alarm/staleness": 1.0}
    assert len(halted) == 1


def test_what_an_alarm_stopped_stays_stopped_until_its_limits_change() -> None:
    ledger, halted = Halts(), list[str]()
    watch([], ledger).after_step(host(1, halted), {"staleness/max": 2.0})
    after_restart: list[str] = []
    watch([], ledger).restore(host(1, after_restart))
    assert after_restart[0].startswith(halted[0]) and "[health]" in after_restart[0]
    with_other_limits: list[str] = []
    watch([], ledger, staleness={"action": "warn"}).restore(host(1, with_other_limits))
    assert with_other_limits == []


def test_an_alarm_of_what_happens_beside_steps_is_told_until_it_is_over() -> None:
    events: list[dict[str, Any]] = []
    health, solver = watch(events), host(3, [])
    for text in ("full", "still full"):
        health.sound(solver, "checkpoint", text)
    assert health.warnings == ["checkpoint of 'solver': still full"]
    assert health.after_step(host(4, []), {"grad_norm": 1.0}) == {"alarm/checkpoint": 1.0}
    for _ in range(2):
        health.sound(solver, "checkpoint", "")
    assert health.warnings == [] and health.after_step(host(5, []), {"grad_norm": 1.0}) == {}
    assert [(event["event"], event["alarm"]) for event in events] == [
        ("alarm", "checkpoint"),
        ("alarm_ended", "checkpoint"),
    ]
    assert events[0]["text"] == "full"
