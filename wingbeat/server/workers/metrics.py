"""Prometheus metrics of engines."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from wingbeat.server.workers.engines import EnginePool


class EngineMetrics:
    """What is known of the connected engines; measured when somebody asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connected = Gauge("wingbeat_engines", "Engines connected now.", registry=registry)
        self.requests = Gauge(
            "wingbeat_engine_requests",
            "Requests inside an engine, as of its last heartbeat.",
            ["worker", "policy", "state"],
            registry=registry,
        )
        self.rate = Gauge(
            "wingbeat_engine_rate",
            "Tokens per second of one generation on an engine, as routing expects them.",
            ["worker", "policy"],
            registry=registry,
        )
        self.lag = Gauge(
            "wingbeat_engine_lag",
            "Versions that an engine's weights are behind the freshest engine's.",
            ["worker", "policy"],
            registry=registry,
        )
        self.quarantines = Counter(
            "wingbeat_engine_quarantines",
            "Times that an engine said of its weights what cannot be.",
            ["policy"],
            registry=registry,
        )

    def measure(self, pool: EnginePool) -> None:
        """Bring the gauges up to date."""
        self.connected.set(len(pool.links))
        for gauge in (self.requests, self.rate, self.lag):
            gauge.clear()
        for link in pool.links:
            for policy, stats in link.stats.items():
                for state in ("running", "waiting"):
                    self.requests.labels(link.worker_id, policy, state).set(stats.get(state, 0.0))
            for policy in link.acknowledged:
                self.lag.labels(link.worker_id, policy).set(pool.weights.lag(link, policy))
        for policy in {policy for link in pool.links for policy in link.acknowledged}:
            for worker, rate in pool.rates(policy).items():
                self.rate.labels(worker, policy).set(rate)
