"""``python -m wingbeat.workers trainer``: a process that optimises one policy, or those of a LoRA group by turns.

It publishes weights once on start and after every step, while the next step runs; control decides what is trained
when.  Commands are executed on the compute thread, those of one policy in the order they come.  Policies share the base
model and nothing else (:class:`~wingbeat.workers.trained_policy.TrainedPolicy`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wingbeat.core.weight_protocol import KeepVersions, ReleaseVersion
from wingbeat.core.worker_protocol import (
    BeginLineage,
    Export,
    Failed,
    Heartbeat,
    SaveCheckpoint,
    Shutdown,
    TrainStep,
    WorkerMessage,
)
from wingbeat.trainer.shared_base import SharedBases
from wingbeat.weights.overlap import Carry, stay
from wingbeat.weights.upload import UploadRefused, Uploads
from wingbeat.workers.link import Connected, Disconnected, Inbound, Own
from wingbeat.workers.main import WorkerArguments, run_worker
from wingbeat.workers.trained_policy import FAILURES, Surroundings, TrainedPolicy
from wingbeat.workers.turns import FairInbox

logger = logging.getLogger(__name__)

MAKES_ROOM = ReleaseVersion | KeepVersions


class Stopping(Exception):
    """Told to end while something was waited for."""


@dataclass(frozen=True, slots=True)
class PublishEnded(Own):
    """The publishing thread is free again."""

    policy: str
    error: BaseException | None = None
    """What ended it although nobody stopped it."""


class TrainerWorker:
    """The compute side: executes control's commands one by one."""

    def __init__(
        self,
        host_id: str,
        send: Callable[..., None],
        deliver: Callable[[Inbound], None],
        *,
        carry: Carry = stay,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``deliver`` puts a message into the inbox that ``run`` reads, from any thread.

        ``carry`` brings published files to control, where that is on another host.
        """
        self._host_id = host_id
        self._send = send
        self._deliver = deliver
        self._carry = carry
        self._sleep = sleep
        self._hosted: dict[str, TrainedPolicy] = {}
        self._bases = SharedBases()
        self._receive: Callable[..., list[Inbound]] = lambda **how: []
        self._inbox = FairInbox()
        """Came, and is not handled yet."""
        self._busy_s = 0.0
        self._stopped = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Connected: self._on_connected,
            Disconnected: lambda message: None,
            TrainStep: self._on_train_step,
            SaveCheckpoint: self._on_save,
            Export: self._on_export,
            ReleaseVersion: lambda message: self._hosted[message.policy].release(message),
            KeepVersions: lambda message: self._hosted[message.policy].keep(message),
            BeginLineage: self._on_begin_lineage,
            PublishEnded: self._on_publish_ended,
            Shutdown: self._on_shutdown,
        }

    def run(self, receive: Callable[..., list[Inbound]]) -> None:
        """Serve until told to shut down."""
        self._receive = receive
        try:
            while not self._stopped:
                self._inbox.extend(receive(block=not self._inbox))
                self._make_room()
                if not self._inbox:
                    continue
                message = self._inbox.take()
                started = time.perf_counter()
                self._handlers[type(message)](message)
                self._busy_s += time.perf_counter() - started
        except Stopping:
            logger.info("told to end while weights were being published")
        finally:
            for hosted in self._hosted.values():
                hosted.publishing.close()

    def heartbeat(self) -> Heartbeat:
        """Called on the I/O thread; only reads."""
        busy, self._busy_s = self._busy_s, 0.0
        return Heartbeat(busy_s=busy)

    # --- what waits ---------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Versions are released before all else that waits: many steps may be queued (a replay), each with a file."""
        for message in self._inbox:
            if isinstance(message, MAKES_ROOM | PublishEnded) and message.policy in self._hosted:
                self._inbox.remove(message)
                self._handlers[type(message)](message)

    def _settle(self, hosted: TrainedPolicy) -> None:
        """Wait until nothing is on its way.  Raises Stopping.

        A full folder does not undo a step: control is told, and it is tried again until there is room.  Meanwhile
        versions are released, which makes room; all else waits its turn.
        """
        while hosted.publishing.is_busy:
            self._inbox.extend(self._receive(block=True))
            self._make_room()
            if any(isinstance(message, Shutdown) for message in self._inbox):
                raise Stopping
        try:
            hosted.publishing.check()
        except UploadRefused as error:
            hosted.refused(error)

    def _on_publish_ended(self, message: PublishEnded) -> None:
        """What a publishing thread does not expect ends the process: its successor publishes again."""
        if isinstance(message.error, UploadRefused):
            self._hosted[message.policy].refused(message.error)
        elif message.error is not None:
            raise message.error

    def _ensure_published(self, hosted: TrainedPolicy) -> None:
        """Publish the weights now if they are not; raises UploadRefused where nobody will receive them.

        A trainer whose last step failed goes back to its checkpoint for that: what it holds may be half a step.
        """
        self._settle(hosted)
        if hosted.stands_at is None and hosted.failure:
            hosted.reload()
        if hosted.stands_at is None:
            hosted.publish()
            self._settle(hosted)
        if hosted.stands_at is None:
            assert hosted.refusal is not None, "it was published just now"
            raise hosted.refusal

    # --- commands -----------------------------------------------------------------------------

    def _on_connected(self, message: Connected) -> None:
        surroundings = Surroundings(
            message.welcome,
            self._host_id,
            self._send,
            on_publish_ended=lambda policy, error: self._deliver(PublishEnded(policy, error)),
            carry=self._carry,
            sleep=self._sleep,
            bases=self._bases,
        )
        for spec in message.welcome.policies:
            if spec.name not in self._hosted:
                self._hosted[spec.name] = TrainedPolicy(spec, surroundings)
            hosted = self._hosted[spec.name]
            try:
                self._ensure_published(hosted)
            except UploadRefused:  # control was told
                continue
            self._send(hosted.ready())
            self._send(*hosted.last_said())

    def _on_train_step(self, message: TrainStep) -> None:
        hosted = self._hosted[message.batch.policy]
        if not self._guard(hosted, "train_step", lambda: hosted.take_step(message.batch)):
            return
        if message.publish:
            self._settle(hosted)
            hosted.publish(delta=message.delta)

    def _on_begin_lineage(self, message: BeginLineage) -> None:
        hosted = self._hosted[message.policy]

        def begin() -> WorkerMessage:
            self._settle(hosted)
            if hosted.failure:
                hosted.reload()
            self._ensure_published(hosted)
            return hosted.begin_lineage(message.lineage)

        self._guard(hosted, "begin_lineage", begin)

    def _on_save(self, message: SaveCheckpoint) -> None:
        hosted = self._hosted[message.policy]
        self._guard(hosted, "save_checkpoint", hosted.save)

    def _on_export(self, message: Export) -> None:
        hosted = self._hosted[message.policy]
        self._guard(hosted, "export", lambda: hosted.export(Path(message.path)))

    def _on_shutdown(self, message: Shutdown) -> None:
        self._stopped = True

    def _guard(self, hosted: TrainedPolicy, command: str, action: Callable[[], WorkerMessage]) -> bool:
        """Run a command and send what it says; whether it did not fail.

        A failure is reported by name, and the process goes on.
        """
        try:
            said = action()
        except FAILURES as error:
            name = hosted.spec.name
            logger.exception("%s of policy %s failed", command, name)
            self._send(Failed(policy=name, command=command, error=f"{type(error).__name__}: {error}"))
            return False
        self._send(said)
        return True


def main() -> None:
    """Entry point of the process."""
    arguments = WorkerArguments.parse()
    run_worker("trainer", arguments, partial(TrainerWorker, carry=Uploads(arguments.url, arguments.key).carry))
