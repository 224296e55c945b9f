"""What control does with alarms, without a process: see also the integration tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.server.health import HealthWatch
from wingbeat.server.metrics import ControlMetrics

pytestmark = pytest.mark.unit


def watch(events: list[dict[str, Any]]) -> HealthWatch:
    config = Config.model_validate({"policies": {"solver": {"model": "m"}}, "dataflow": {"max_staleness": 1}})
    log = EventLog(None, clock=lambda: 0.0)
    log.subscribe(events.append)
    return HealthWatch(config, events=log, metrics=ControlMetrics())


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
