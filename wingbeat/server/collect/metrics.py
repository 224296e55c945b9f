"""Prometheus metrics of collected conversations, by name of the key: people make keys, so there are few."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class CollectMetrics:
    """Registered with those of control."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter(
            "wingbeat_collected_conversations",
            "Collected conversations that ended, by what became of them.",
            ["key", "result"],
            registry=registry,
        )
        self.ambiguous = Counter(
            "wingbeat_collect_ambiguous",
            "Calls that go on with one of several conversations that say the same: a new one was opened.",
            ["key"],
            registry=registry,
        )
        self._open = Gauge(
            "wingbeat_collect_open", "Collected conversations that wait for feedback.", ["key"], registry=registry
        )
        self._disk = Gauge("wingbeat_collect_disk_bytes", "What those take on disk.", registry=registry)

    def now(self, counts: Mapping[str, int], num_bytes: int) -> None:
        """What is open now."""
        self._open.clear()
        for key, count in counts.items():
            self._open.labels(key).set(count)
        self._disk.set(num_bytes)
