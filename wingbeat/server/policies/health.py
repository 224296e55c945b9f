"""Tells people of health alarms: events, metrics, status; ends the training of a policy where an alarm demands it.

Most alarms come from the metrics of a step.  Others are of what happens beside steps: weights that are not published,
checkpoints that cannot be written (:meth:`HealthWatch.sound`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from wingbeat.core.config import Config
from wingbeat.core.events import EventLog
from wingbeat.dataflow.health import HealthMonitor
from wingbeat.dataflow.ledger import Ledger
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies.host import PolicyHost

logger = logging.getLogger(__name__)


class HealthWatch:
    """One monitor for each policy that trains."""

    def __init__(
        self,
        config: Config,
        *,
        events: EventLog,
        metrics: ControlMetrics,
        ledger: Ledger,
        watch: Callable[[Future[Any]], None],
    ) -> None:
        self._events = events
        self._metrics = metrics
        self._monitors = {
            name: HealthMonitor(config.health, dtype=policy.dtype, max_staleness=config.dataflow.max_staleness)
            for name, policy in config.policies.items()
            if policy.trainable
        }
        self._ledger = ledger
        self._watch = watch
        self._settings = config.health.model_dump_json()
        self._seen: set[str] = set()
        """Policies that have taken a step in this process."""
        self._beside_steps: dict[tuple[str, str], str] = {}
        """What is said of each (policy, alarm) that sounds, and is of no step's metrics."""

    @property
    def warnings(self) -> list[str]:
        """The alarms that sound now, in plain words."""
        of_steps = [
            f"{alarm.name} of {policy!r}: {alarm.text}"
            for policy, monitor in self._monitors.items()
            for alarm in monitor.active
        ]
        return of_steps + [f"{name} of {policy!r}: {text}" for (policy, name), text in self._beside_steps.items()]

    def sound(self, host: PolicyHost, name: str, text: str) -> None:
        """An alarm about what happens beside steps sounds, with the newest words; "" ends it."""
        key = (host.name, name)
        before = self._beside_steps.pop(key, "")
        if text:
            self._beside_steps[key] = text
        self._metrics.alarms.labels(*key).set(bool(text))
        if text and not before:
            logger.warning("alarm %s of %s: %s", name, host.name, text)
            self._events.emit("alarm", policy=host.name, step=host.version, alarm=name, action="warn", text=text)
        elif before and not text:
            self._events.emit("alarm_ended", policy=host.name, step=host.version, alarm=name)

    def restore(self, host: PolicyHost) -> None:
        """What an alarm stopped stays stopped over restarts, until the limits of ``[health]`` are others."""
        reason = self._ledger.halt_of(host.name, settings=self._settings) if host.name in self._monitors else ""
        if reason:
            host.halt(f"{reason}; other limits in [health] let it go on")

    def after_step(self, host: PolicyHost, metrics: Mapping[str, float]) -> dict[str, float]:
        """Look at a step; gives ``alarm/NAME`` = 1 for the alarms that sound now."""
        monitor = self._monitors[host.name]
        if host.name not in self._seen and host.version > 1:
            # perhaps logged before a restart, when another `max_staleness` may have held
            metrics = {name: value for name, value in metrics.items() if name != "staleness/max"}
        self._seen.add(host.name)
        report = monitor.observe(metrics)
        for alarm in report.began:
            logger.warning("alarm %s of %s: %s", alarm.name, host.name, alarm.text)
            self._events.emit(
                "alarm",
                policy=host.name,
                step=host.version,
                alarm=alarm.name,
                value=alarm.value,
                limit=alarm.limit,
                action=alarm.action,
                text=alarm.text,
            )
        for name in report.ended:
            self._events.emit("alarm_ended", policy=host.name, step=host.version, alarm=name)
        sounding = {alarm.name for alarm in monitor.active}
        for name in monitor.names:
            self._metrics.alarms.labels(host.name, name).set(name in sounding)
        if report.stop is not None:
            reason = f"training of {host.name!r} stopped by the alarm {report.stop.name}: {report.stop.text}"
            self._watch(self._ledger.record_halt(host.name, reason=reason, settings=self._settings))
            host.halt(reason)
        beside = {name for policy, name in self._beside_steps if policy == host.name}
        return {f"alarm/{name}": 1.0 for name in sounding | beside}
