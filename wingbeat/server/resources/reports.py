"""What the pools of clients and of resources servers report, added up by kind and label.

A report says what its pool counted since it began.  What is added is how much that grew since the pool's last report,
so that sums never fall: not when a client ends, nor when another begins under its name, whose counts start anew.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wingbeat.core.protocol_resources import ResourceReport, ResourceServer
from wingbeat.core.resource_reports import (
    COUNTS,
    NOW,
    OTHER,
    REPORT_EVERY_S,
    TIMES,
    Durations,
    ResourceClass,
    ResourceStatus,
)

GONE_AFTER_S = 3 * REPORT_EVERY_S
MAX_CLASSES = 200
"""Kinds and labels with series of their own; labels are anybody's to choose."""
MAX_POOLS = 1024
"""Of one key: the one that was silent longest is forgotten first."""

_Key = tuple[str, str]


@dataclass(slots=True)
class _Pool:
    """The last report of one."""

    seen_at: float = 0.0
    has_left: bool = False
    url: str = ""
    kinds: tuple[str, ...] = ()
    classes: dict[_Key, ResourceClass] = field(default_factory=dict[_Key, ResourceClass])


class PoolReports(Collector):
    """Of all pools; a Prometheus collector."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: dict[str, OrderedDict[str, _Pool]] = {}
        """By account (the key's id) and name; the one that reported last stands last."""
        self._sums: dict[_Key, ResourceClass] = {}
        """What only grows, of all pools that there ever were."""

    def take(self, account: str, report: ResourceReport) -> None:
        """A pool's next report; ``account`` is whose key sent it."""
        pools = self._pools.setdefault(account, OrderedDict())
        pool = pools.setdefault(report.client_id, _Pool())
        pools.move_to_end(report.client_id)
        classes: dict[_Key, ResourceClass] = {}
        for found in report.classes:  # one that comes twice is one
            classes[found.key] = classes[found.key].plus(found) if found.key in classes else found
        for key, now in classes.items():
            self._grow(key, now, pool.classes.get(key))
        pool.classes = classes
        pool.seen_at, pool.has_left = self._clock(), report.leaving
        pool.url, pool.kinds = report.url, report.kinds
        while len(pools) > MAX_POOLS:
            pools.popitem(last=False)

    def _grow(self, key: _Key, now: ResourceClass, before: ResourceClass | None) -> None:
        shown = self._shown(key)
        total = self._sums.get(shown) or ResourceClass(kind=shown[0], label=shown[1])
        if before is None or now.starts < before.starts or now.wait.count < before.wait.count:
            before = ResourceClass(kind=key[0], label=key[1])  # a pool that began anew
        update: dict[str, Any] = {
            name: getattr(total, name) + max(0, getattr(now, name) - getattr(before, name)) for name in COUNTS
        }  # seconds are sums of floats, which may fall by a rounding
        for name in TIMES:
            update[name] = _grown(getattr(total, name), getattr(now, name), getattr(before, name))
        self._sums[shown] = total.model_copy(update=update)

    def _shown(self, key: _Key) -> _Key:
        """Under which a class counts: the first so many have series of their own."""
        return key if key in self._sums or len(self._sums) < MAX_CLASSES else (OTHER, OTHER)

    def _present(self) -> Iterable[_Pool]:
        now = self._clock()
        for pools in self._pools.values():
            for pool in pools.values():
                if not pool.has_left and now - pool.seen_at <= GONE_AFTER_S:
                    yield pool

    def classes(self) -> list[ResourceStatus]:
        """Of all pools together, by kind and label."""
        found = {key: ResourceStatus(**dict(total)) for key, total in self._sums.items()}
        for pool in self._present():
            for key, now in pool.classes.items():
                shown = self._shown(key)
                status = found[shown]
                update = {name: getattr(status, name) + getattr(now, name) for name in NOW}
                found[shown] = status.model_copy(update={**update, "pools": status.pools + 1})
        return [
            status.model_copy(update={"utilisation": status.busy_s / status.live_s if status.live_s > 0 else 0.0})
            for _, status in sorted(found.items())
        ]

    def servers(self) -> list[ResourceServer]:
        """Those that lend, the least busy first."""
        found: dict[str, ResourceServer] = {}
        for pool in self._present():
            if pool.url:
                leased = sum(c.leased for c in pool.classes.values())
                waiting = sum(c.waiting for c in pool.classes.values())
                found[pool.url] = ResourceServer(url=pool.url, kinds=pool.kinds, leased=leased, waiting=waiting)
        return sorted(found.values(), key=lambda server: (server.waiting, server.leased, server.url))

    def collect(self) -> Iterable[Metric]:
        """For Prometheus."""
        return families(self.classes())


def _grown(total: Durations, now: Durations, before: Durations) -> Durations:
    return Durations(
        count=total.count + max(0, now.count - before.count),
        total_s=total.total_s + max(0.0, now.total_s - before.total_s),
        max_s=max(total.max_s, now.max_s),
    )


_GAUGES = {
    "live": "Resources that there are now, those that start or close among them.",
    "idle": "Resources that nobody uses now.",
    "leased": "Resources in use now.",
    "waiting": "Leases that wait for their turn now.",
    "utilisation": "The share of their lives in which resources were in use.",
}
_COUNTERS = {
    "starts": ("starts", "Resources that were begun, also those that failed to start."),
    "failures": ("start_failures", "Resources that failed to start."),
    "resets": ("resets", "Resets of resources."),
    "quarantined": ("quarantined", "Resources taken out of use, since a reset or check failed or they were lost."),
    "leaked": ("leaked", "Resources that could not be closed in time."),
    "live_seconds": ("live_s", "Seconds that resources lived, added up."),
    "busy_seconds": ("busy_s", "Seconds that resources were in use, added up."),
    "cost": ("cost", "What resources with a price cost."),
}
_SECONDS = {
    "wait": "Seconds that leases waited for their turn.",
    "start": "Seconds that starts took.",
    "reset": "Seconds that resets took, with the check after them.",
    "hold": "Seconds that resources were held.",
}
_LABELS = ["kind", "label"]


def families(classes: Iterable[ResourceStatus]) -> list[Metric]:
    """``wingbeat_resources_*`` of these classes."""
    gauges = {n: GaugeMetricFamily(f"wingbeat_resources_{n}", text, labels=_LABELS) for n, text in _GAUGES.items()}
    counters = {
        n: CounterMetricFamily(f"wingbeat_resources_{n}", text, labels=_LABELS) for n, (_, text) in _COUNTERS.items()
    }
    times = {
        n: SummaryMetricFamily(f"wingbeat_resources_{n}_seconds", text, labels=_LABELS) for n, text in _SECONDS.items()
    }
    longest = {
        n: GaugeMetricFamily(f"wingbeat_resources_{n}_seconds_max", f"{text} The most of one.", labels=_LABELS)
        for n, text in _SECONDS.items()
    }
    for found in classes:
        names = [found.kind, found.label]
        for name, gauge in gauges.items():
            gauge.add_metric(names, getattr(found, name))
        for name, counter in counters.items():
            counter.add_metric(names, getattr(found, _COUNTERS[name][0]))
        for name, family in times.items():
            seconds: Durations = getattr(found, name)
            family.add_metric(names, seconds.count, seconds.total_s)
            longest[name].add_metric(names, seconds.max_s)
    return [*gauges.values(), *counters.values(), *times.values(), *longest.values()]
