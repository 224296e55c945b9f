"""What control has of engines, made and wired."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.workers.admission import EngineAdmission
from wingbeat.server.workers.engines import EnginePool
from wingbeat.server.workers.served import lag_limit
from wingbeat.server.workers.sessions import SessionParts

if TYPE_CHECKING:
    from wingbeat.server.control import Control

logger = logging.getLogger(__name__)

ENGINE_WAIT_S = 120.0


def make_engines(control: Control) -> EnginePool:
    config = control.config
    pool = EnginePool(
        wait_s=ENGINE_WAIT_S,
        on_activity=control.overlap.generating,
        max_lag=lag_limit(config.engine.max_lag, max_staleness=config.dataflow.max_staleness),
        clock=control.clock,
    )

    def quarantined(link: EngineLink, policy: str, reason: str) -> None:
        """Tell people of an engine that says what cannot be, and when that is over (no ``reason``)."""
        if reason:
            logger.error("engine %s is quarantined for %s: %s", link.worker_id, policy, reason)
            control.metrics.of_engines.quarantines.labels(policy).inc()
        event = "engine_quarantined" if reason else "engine_released"
        control.events.emit(event, worker_id=link.worker_id, policy=policy, reason=reason)
        control.changed.notify()

    pool.on_quarantine = quarantined
    return pool


def make_admission(control: Control) -> EngineAdmission:
    config = control.config
    mismatch = config.engine.version_mismatch
    return EngineAdmission(config.policies, mismatch, config.server.heartbeat_s, control.events)


def make_session_parts(control: Control) -> SessionParts:
    return SessionParts(
        control.engines,
        control.policies,
        control.events,
        control.changed,
        is_stopping=lambda: control.stopping,
        max_running=control.config.engine.max_running,
    )
