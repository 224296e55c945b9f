"""The connected engines, for people."""

from __future__ import annotations

from collections.abc import Mapping

from wingbeat.core.engine_protocol import EngineReply, ServedReply
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.workers.engines import EnginePool


def engine_replies(pool: EnginePool) -> list[EngineReply]:
    """For ``GET /api/status``."""
    rates = {policy: pool.rates(policy) for link in pool.links for policy in link.acknowledged}
    return [_reply(pool, link, rates) for link in pool.links]


def engine_blockers(pool: EnginePool) -> list[str]:
    """What engines could not do, and what they do not say truly."""
    failures = [failure for link in pool.links for failure in link.failures.values()]
    return failures + [
        f"engine {link.worker_id!r} is quarantined, and gets no calls of {policy!r} until it acknowledges what is"
        f" live: {reason}; if that does not end by itself, start it again"
        for link in pool.links
        for policy, reason in link.quarantined.items()
    ]


def _reply(pool: EnginePool, link: EngineLink, rates: Mapping[str, Mapping[str, float]]) -> EngineReply:
    return EngineReply(
        name=link.worker_id,
        host=link.host_id,
        pid=link.pid,
        software=dict(link.software),
        parallelism=link.parallelism,
        state="leaving" if link.leaving else "serving" if link.acknowledged else "loading",
        in_flight=len(link.flights),
        served={
            policy: ServedReply(
                version=served.version,
                lineage=served.lineage,
                checksum=served.checksum,
                lag=pool.weights.lag(link, policy),
                rate=round(rates[policy][link.worker_id], 3),
                gets_calls=link.serves(policy, None),
            )
            for policy, served in link.acknowledged.items()
        },
        quarantined=dict(link.quarantined),
    )
