"""Prometheus metrics of control, in a registry of their own (two servers in one process do not clash)."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from wingbeat.server.collect.metrics import CollectMetrics
from wingbeat.server.resources.reports import PoolReports
from wingbeat.server.variants.metrics import VariantMeter
from wingbeat.server.workers.metrics import EngineMetrics

BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300)


class ControlMetrics:
    """All counters of control."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._turn_children: dict[str, tuple[Counter, Counter, Histogram]] = {}
        r = self.registry
        self.turns = Counter("wingbeat_turns", "Model calls answered.", ["policy"], registry=r)
        self.sampled_tokens = Counter("wingbeat_sampled_tokens", "Tokens sampled.", ["policy"], registry=r)
        self.turn_seconds = Histogram(
            "wingbeat_turn_seconds", "Seconds from prompt to the last token.", ["policy"], buckets=BUCKETS_S, registry=r
        )
        self.forks = Counter("wingbeat_forks", "Turns whose prompt extends no earlier turn.", ["policy"], registry=r)
        self.replays = Counter("wingbeat_replays", "Retries answered from an earlier or running call.", registry=r)
        self.malformed_tool_calls = Counter(
            "wingbeat_malformed_tool_calls", "Tool calls that are no JSON; kept as text.", ["policy"], registry=r
        )
        self.episodes = Counter(
            "wingbeat_episodes", "Episodes ended, by outcome or loss.", ["split", "outcome"], registry=r
        )
        self.agents = VariantMeter()
        r.register(self.agents)
        self.pools = PoolReports(clock=clock)
        r.register(self.pools)
        self.attempts = Counter(
            "wingbeat_attempts", "Attempts ended, by outcome and cause.", ["split", "outcome", "cause"], registry=r
        )
        self.refused = Counter(
            "wingbeat_refused", "Requests refused with 429 because of [limits].", ["limit"], registry=r
        )
        self.discarded = Gauge(
            "wingbeat_discarded_episodes", "Finished episodes not trained, so far.", ["policy", "reason"], registry=r
        )
        self.untrainable = Counter(
            "wingbeat_untrainable_tokens", "Sampled tokens that cannot train.", ["policy", "reason"], registry=r
        )
        self.untrained_episodes = Counter(
            "wingbeat_untrained_episodes",
            "Finished training episodes in which no trainable policy took a turn.",
            registry=r,
        )
        self.late_finishes = Counter(
            "wingbeat_late_finishes", "Finishes refused because a successor attempt had begun.", registry=r
        )
        self.transactions = Counter(
            "wingbeat_transactions",
            "Transactions decided, of episodes shared with other servers.",
            ["decision"],
            registry=r,
        )
        self.transactions_in_doubt = Gauge(
            "wingbeat_transactions_in_doubt", "Transactions that wait for their decision now.", registry=r
        )
        self.train_steps = Counter("wingbeat_train_steps", "Optimiser steps.", ["policy"], registry=r)
        self.version = Gauge("wingbeat_policy_version", "Policy version.", ["policy"], registry=r)
        self.train = Gauge("wingbeat_train", "Last value of each training metric.", ["policy", "metric"], registry=r)
        self.alarms = Gauge(
            "wingbeat_alarm", "1 while a health alarm of a policy sounds.", ["policy", "alarm"], registry=r
        )
        self.open_episodes = Gauge("wingbeat_open_episodes", "Episodes running now.", registry=r)
        self.leases = Gauge("wingbeat_leases", "Slots that are leased and not begun yet.", registry=r)
        self.in_flight = Gauge("wingbeat_requests_in_flight", "Generations running or waiting now.", registry=r)
        self.waiting = Gauge("wingbeat_requests_waiting", "Generations that wait for room in an engine.", registry=r)
        self.of_engines = EngineMetrics(r)
        self.collect = CollectMetrics(r)

    def turn(self, policy: str, num_tokens: int, seconds: float) -> None:
        turns, tokens, duration = self._of_turns(policy)
        turns.inc()
        tokens.inc(num_tokens)
        duration.observe(seconds)

    def _of_turns(self, policy: str) -> tuple[Counter, Counter, Histogram]:
        """The children of a policy, looked up once: this is the hot path."""
        found = self._turn_children.get(policy)
        if found is None:
            found = self.turns.labels(policy), self.sampled_tokens.labels(policy), self.turn_seconds.labels(policy)
            self._turn_children[policy] = found
        return found

    def set_discarded(self, policy: str, reason: str, num_episodes: int) -> None:
        self.discarded.labels(policy, reason).set(num_episodes)

    def step(self, policy: str, version: int, values: dict[str, float]) -> None:
        self.train_steps.labels(policy).inc()
        self.version.labels(policy).set(version)
        for name, value in values.items():
            self.train.labels(policy, name).set(value)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
