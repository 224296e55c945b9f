"""One connected worker each: feeds what it says to the part of control that it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wingbeat.core.events import EventLog
from wingbeat.core.signals import Changed
from wingbeat.core.weight_protocol import Published, WeightsServed
from wingbeat.core.worker_protocol import (
    CheckpointSaved,
    ControlMessage,
    Exported,
    Failed,
    Heartbeat,
    Leave,
    MovedOut,
    Register,
    StepDone,
    Tokens,
    TrainerReady,
    WorkerMessage,
)
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.policies.host import PolicyHost
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
        self._link = EngineLink(
            register.worker_id,
            register.host_id,
            send,
            pid=register.pid,
            policies=register.policies,
            software=register.software,
            relay_url=register.relay_url,
            parallelism=register.parallelism,
        )
        if register.bounded:
            self._link.capacity = parts.max_running
        parts.events.emit(
            "engine_joined",
            worker_id=register.worker_id,
            pid=register.pid,
            host_id=register.host_id,
            software=register.software,
        )
        for earlier in parts.engines.links:
            if earlier.worker_id == register.worker_id:  # its connection is broken, and we have not noticed
                parts.engines.leave(earlier)
        parts.engines.join(self._link)
        parts.changed.notify()

    def receive(self, message: WorkerMessage) -> None:
        match message:
            case Tokens(chunks=chunks):
                self._parts.engines.receive(self._link, chunks)
            case WeightsServed():
                self._link.receive_s = message.receive_s or self._link.receive_s
                self._parts.engines.served(self._link, message)
                if message.policy not in self._link.quarantined:
                    self._link.failures.pop(message.policy, None)
                for host in self._parts.policies.values():
                    host.release_unused()
                self._parts.changed.notify()
            case Heartbeat(stats=stats):
                self._link.stats = {name: stats[name] for name in self._parts.policies if name in stats}
                self._parts.engines.beat(self._link)
            case MovedOut():
                self._parts.engines.moved_out(self._link, message)
            case Leave(drain_s=drain_s):
                self._parts.events.emit("engine_leaving", worker_id=self._link.worker_id, drain_s=drain_s)
                self._parts.engines.stop_sending(self._link)
                self._parts.changed.notify()
            case Failed(policy=policy, command=command, error=error):
                self._parts.events.emit(
                    "engine_failed", worker_id=self._link.worker_id, policy=policy, command=command, error=error
                )
                self._link.failures[policy] = f"engine {self._link.worker_id}: {command} of {policy!r} failed: {error}"
                if command == "update_weights":
                    self._parts.engines.failed(self._link, policy)
                elif command == "pin_version":
                    self._parts.engines.pin_failed(self._link, policy)
                self._parts.changed.notify()
            case _:
                logger.error("engine %s sent %.200s, which engines do not send", self._link.worker_id, message)

    def closed(self) -> None:
        if self._link in self._parts.engines.links and not self._parts.is_stopping():
            self._parts.events.emit("engine_left", worker_id=self._link.worker_id, drained=self._link.leaving)
        self._parts.engines.leave(self._link)
        self._parts.changed.notify()


class TrainerSession:
    """A trainer's connection: what it says of a policy goes to that policy."""

    def __init__(
        self,
        hosts: Sequence[PolicyHost],
        register: Register,
        send: Callable[[ControlMessage], None],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._send = send
        self._is_stopping = is_stopping
        for host in hosts:
            host.trainer.joined(send, worker_id=register.worker_id, software=register.software)

    def receive(self, message: WorkerMessage) -> None:
        if isinstance(message, Heartbeat):
            return
        host = self._hosts.get(getattr(message, "policy", ""))
        if host is None:
            names = ", ".join(self._hosts)
            logger.error("the trainer of %s sent %.200s, which is of none of them", names, message)
            return
        if not host.trainer.is_from(self._send):
            logger.warning("a former trainer of %s says %s: nobody heeds it", host.name, type(message).__name__)
            return
        match message:
            case TrainerReady():
                host.trainer.ready(message)
            case StepDone():
                host.trainer.step_done(message)
            case Published():
                host.trainer.published(message)
            case CheckpointSaved():
                host.trainer.checkpoint_saved(message)
            case Exported():
                host.trainer.exported(message)
            case Failed():
                host.trainer.failed(message)
            case _:
                logger.error("the trainer of %s sent %.200s, which trainers do not send", host.name, message)

    def closed(self) -> None:
        for host in self._hosts.values():
            host.trainer.left(self._send, expected=self._is_stopping())
