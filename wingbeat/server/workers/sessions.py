"""One connected worker each: feeds what it says to the part of control that it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wingbeat.core.events import EventLog
from wingbeat.core.worker_protocol import (
    CheckpointSaved,
    ControlMessage,
    Exported,
    Failed,
    Heartbeat,
    Register,
    StepDone,
    Tokens,
    TrainerReady,
    WeightsServed,
    WorkerMessage,
)
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.policies.host import PolicyHost
from wingbeat.server.signals import Changed
from wingbeat.server.workers.engines import EnginePool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What sessions feed."""

    engines: EnginePool
    policies: Mapping[str, PolicyHost]
    events: EventLog
    changed: Changed
    is_stopping: Callable[[], bool] = lambda: False
    """Workers that are told to end are not lost."""
    max_running: int = 0
    """Generations that an engine of ours runs together; 0: no bound."""


class EngineSession:
    """An engine's connection: tokens and acknowledgements go to the pool."""

    def __init__(self, parts: SessionParts, register: Register, send: Callable[[ControlMessage], None]) -> None:
        self._parts = parts
        self._link = EngineLink(register.worker_id, register.host_id, send)
        if register.bounded:
            self._link.capacity = parts.max_running
        parts.events.emit("engine_joined", worker_id=register.worker_id, pid=register.pid)
        parts.engines.join(self._link)
        parts.changed.notify()

    def receive(self, message: WorkerMessage) -> None:
        match message:
            case Tokens(chunks=chunks):
                self._parts.engines.receive(self._link, chunks)
            case WeightsServed():
                self._link.failures.pop(message.policy, None)
                self._parts.engines.served(self._link, message)
                for host in self._parts.policies.values():
                    host.release_unused()
                self._parts.changed.notify()
            case Heartbeat(stats=stats):
                self._link.stats = {name: stats[name] for name in self._parts.policies if name in stats}
            case Failed(policy=policy, command=command, error=error):
                self._parts.events.emit("engine_failed", policy=policy, command=command, error=error)
                self._link.failures[policy] = f"engine {self._link.worker_id}: {command} of {policy!r} failed: {error}"
                self._parts.changed.notify()
            case _:
                logger.error("engine %s sent %.200s, which engines do not send", self._link.worker_id, message)

    def closed(self) -> None:
        if not self._parts.is_stopping():
            self._parts.events.emit("engine_left", worker_id=self._link.worker_id)
        self._parts.engines.leave(self._link)
        self._parts.changed.notify()


class TrainerSession:
    """A trainer's connection: everything goes to its policy."""

    def __init__(
        self,
        host: PolicyHost,
        register: Register,
        send: Callable[[ControlMessage], None],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._host = host
        self._send = send
        self._is_stopping = is_stopping
        host.trainer.joined(send, worker_id=register.worker_id)

    def receive(self, message: WorkerMessage) -> None:
        match message:
            case TrainerReady():
                self._host.trainer.ready(message)
            case StepDone():
                self._host.trainer.step_done(message)
            case CheckpointSaved():
                self._host.trainer.checkpoint_saved(message)
            case Exported():
                self._host.trainer.exported(message)
            case Failed():
                self._host.trainer.failed(message)
            case Heartbeat():
                return
            case _:
                logger.error("the trainer of %s sent %.200s, which trainers do not send", self._host.name, message)

    def closed(self) -> None:
        self._host.trainer.left(self._send, expected=self._is_stopping())
