"""``python -m wingbeat.workers trainer``: a process that optimises one policy, or those of a LoRA group by turns.

It publishes weights once on start and after every step, while the next step runs; control decides what is trained
when.  Commands are executed on the compute thread, those of one policy in the order they come.  Policies share the base
model and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError

from wingbeat.core.config import PolicyConfig, WeightsConfig
from wingbeat.core.config.lora_groups import group_of
from wingbeat.core.errors import UnavailableError, WingbeatError
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.weight_protocol import AdapterInfo, KeepVersions, Manifest, Published, ReleaseVersion
from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    Export,
    Exported,
    Failed,
    Heartbeat,
    PolicySpec,
    SaveCheckpoint,
    Shutdown,
    StepDone,
    TrainerReady,
    TrainStep,
    Welcome,
)
from wingbeat.trainer.checkpoint import CheckpointStore, LoadReport
from wingbeat.trainer.memory import free_garbage
from wingbeat.trainer.shared_base import SharedBases
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.weights.host import run_weights_dir
from wingbeat.weights.overlap import Carry, OverlappedPublisher, Version
from wingbeat.weights.publish import WeightPublisher
from wingbeat.weights.upload import Uploads
from wingbeat.workers.distributed import DistributedTrainer
from wingbeat.workers.link import Connected, Disconnected, Inbound, Own
from wingbeat.workers.main import WorkerArguments, resolve_device, run_worker
from wingbeat.workers.turns import FairInbox

logger = logging.getLogger(__name__)

VERSIONS_HELD = 4
"""Served, being loaded, being published, and pinned for an evaluation: what must fit into shared memory at once."""
FAILURES = (WingbeatError, OSError, SafetensorError, RuntimeError, ValueError)
"""What a command may raise without ending the process."""
MAKES_ROOM = ReleaseVersion | KeepVersions


class Stopping(Exception):
    """Told to end while something was waited for."""


@dataclass(frozen=True, slots=True)
class PublishEnded(Own):
    """The publishing thread is free again."""

    policy: str
    error: BaseException | None = None
    """What ended it although nobody stopped it."""


@dataclass(slots=True)
class Hosted:
    """Everything that belongs to one policy of this process."""

    spec: PolicySpec
    trainer: PolicyTrainer | DistributedTrainer
    checkpoints: CheckpointStore
    publishing: OverlappedPublisher
    manifest: Manifest | None = None
    """Of what was published last, maybe a step behind the weights."""
    lineage: int = 0
    """Of the weights: that of the last step, or one that has only begun."""
    base_lineage: int = 0
    """The lineage before it, where it has only begun."""
    failure: str = ""
    """Why the last step failed, if it did: the weights may be half a step further than they are called."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that could not be used, each with the reason."""
    last_done: StepDone | None = None
    last_published: Published | None = None
    """Both are said again after a reconnection: control may not have lived to hear them."""

    @property
    def stands_at(self) -> Manifest | None:
        """Of the weights as they are; None where they are not published."""
        manifest = self.manifest
        return manifest if manifest is not None and manifest.version == self.trainer.step else None


class TrainerWorker:
    """The compute side: executes control's commands one by one."""

    def __init__(
        self,
        host_id: str,
        send: Callable[..., None],
        deliver: Callable[[Inbound], None],
        *,
        carry: Carry = lambda manifest, is_wanted: True,
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
        self._hosted: dict[str, Hosted] = {}
        self._bases = SharedBases()
        self._welcome: Welcome | None = None
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
            ReleaseVersion: self._on_release,
            KeepVersions: self._on_keep,
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

    def _make_room(self) -> None:
        """Versions are released before all else that waits: many steps may be queued (a replay), each with a file."""
        for message in self._inbox:
            if isinstance(message, MAKES_ROOM | PublishEnded) and message.policy in self._hosted:
                self._inbox.remove(message)
                self._handlers[type(message)](message)

    def heartbeat(self) -> Heartbeat:
        """Called on the I/O thread; only reads."""
        busy, self._busy_s = self._busy_s, 0.0
        return Heartbeat(busy_s=busy)

    def _on_connected(self, message: Connected) -> None:
        self._welcome = message.welcome
        for spec in message.welcome.policies:
            if spec.name not in self._hosted:
                self._hosted[spec.name] = self._load(message.welcome, spec)
            hosted = self._hosted[spec.name]
            manifest = self._published(hosted)
            self._send_ready(hosted, manifest)
            again = (hosted.last_done, hosted.last_published)
            if again[0] is not None:
                self._send(*(message for message in again if message is not None))

    def _send_ready(self, hosted: Hosted, manifest: Manifest) -> None:
        self._send(
            TrainerReady(
                policy=hosted.spec.name,
                step=hosted.trainer.step,
                manifest=manifest,
                base_lineage=hosted.base_lineage,
                damaged=hosted.damaged,
            )
        )

    def _load(self, welcome: Welcome, spec: PolicySpec) -> Hosted:
        """Build a policy from its folder and restore the last checkpoint."""
        config = PolicyConfig.model_validate(spec.config)
        trainer = build_trainer(welcome, spec, bases=self._bases)
        checkpoints = CheckpointStore(
            Path(welcome.run_dir) / "checkpoints" / spec.name, keep=config.trainer.keep_checkpoints
        )
        report = checkpoints.load_latest(trainer)
        lineage = report.lineage
        folder = run_weights_dir(welcome.run_dir, min_free_bytes=VERSIONS_HELD * trainer.published_bytes)
        chain = WeightsConfig.model_validate(welcome.weights).delta_chain
        publisher = WeightPublisher(folder, host_id=self._host_id, policy=spec.name, delta_chain=chain)
        publishing = OverlappedPublisher(
            publisher,
            on_published=lambda manifest, seconds: self._tell_published(hosted, manifest, seconds),
            on_no_room=lambda error: self._send(Failed(policy=spec.name, command="publish_weights", error=str(error))),
            on_ended=lambda error: self._deliver(PublishEnded(spec.name, error)),
            carry=self._carry if welcome.host_id != self._host_id else lambda manifest, is_wanted: True,
            sleep=self._sleep,
        )
        hosted = Hosted(
            *(spec, trainer, checkpoints, publishing),
            lineage=lineage,
            base_lineage=lineage,
            damaged=damaged_in(report),
        )
        return hosted

    def _on_train_step(self, message: TrainStep) -> None:
        batch = message.batch
        hosted = self._hosted[batch.policy]
        self._guard(hosted, "train_step", lambda: self._take_step(hosted, batch))
        if message.publish and not hosted.failure:
            self._publish(hosted, delta=message.delta)

    def _take_step(self, hosted: Hosted, batch: TrainingBatch) -> None:
        if hosted.failure:
            raise UnavailableError(f"step {batch.step} is not taken: a step before it failed: {hosted.failure}")
        started = time.time()
        hosted.failure = "it did not end"
        try:
            result = hosted.trainer.train_step(batch)
        except FAILURES as error:
            hosted.failure = f"{type(error).__name__}: {error}"
            raise
        hosted.failure = ""
        hosted.lineage = hosted.base_lineage = batch.lineage
        hosted.last_published = None
        hosted.last_done = StepDone(
            policy=batch.policy,
            batch_id=batch.batch_id,
            step=batch.step,
            metrics=dict(result.metrics),
            advantages=dict(result.advantages),
            started_s=started,
            ended_s=time.time(),
        )
        self._send(hosted.last_done)

    # --- publishing ------------------------------------------------------------------------

    def _publish(self, hosted: Hosted, *, delta: bool = False) -> None:
        """Begin to publish the weights as they are, once what was published before is there."""
        self._settle(hosted)
        lora = hosted.trainer.lora
        hosted.publishing.start(
            hosted.trainer.published_tensors(),
            Version(
                version=hosted.trainer.step,
                lineage=hosted.lineage,
                kind=hosted.trainer.kind,
                base_model=hosted.spec.model,
                adapter=None if lora is None else AdapterInfo(rank=lora.rank, alpha=lora.alpha),
                delta=delta,
            ),
        )

    def _tell_published(self, hosted: Hosted, manifest: Manifest, seconds: float) -> None:
        """On the publishing thread."""
        hosted.manifest = manifest
        hosted.last_published = Published(manifest.policy, manifest.version, manifest, seconds)
        self._send(hosted.last_published)

    def _settle(self, hosted: Hosted) -> None:
        """Wait until nothing is on its way.  Raises Stopping.

        A full folder does not undo a step: control is told, and it is tried again until there is room.  Meanwhile
        versions are released, which makes room; all else waits its turn.
        """
        while hosted.publishing.is_busy:
            self._inbox.extend(self._receive(block=True))
            self._make_room()
            if any(isinstance(message, Shutdown) for message in self._inbox):
                raise Stopping
        hosted.publishing.check()

    def _published(self, hosted: Hosted) -> Manifest:
        """What the weights are published as; those that are not yet are published now.

        A trainer whose last step failed goes back to its checkpoint for that: what it holds may be half a step.
        """
        self._settle(hosted)
        if hosted.stands_at is None and hosted.failure:
            self._reload(hosted)
        if hosted.stands_at is None:
            self._publish(hosted)
            self._settle(hosted)
        assert hosted.stands_at is not None, "it was published just now"
        return hosted.stands_at

    def _on_publish_ended(self, message: PublishEnded) -> None:
        """What a publishing thread does not expect ends the process: its successor publishes again."""
        if message.error is not None:
            raise message.error

    def _on_begin_lineage(self, message: BeginLineage) -> None:
        hosted = self._hosted[message.policy]

        def begin() -> None:
            self._settle(hosted)
            if hosted.failure:
                self._reload(hosted)
            manifest = msgspec.structs.replace(self._published(hosted), lineage=message.lineage)
            hosted.base_lineage, hosted.lineage = hosted.lineage, message.lineage
            hosted.manifest = manifest
            hosted.last_done = hosted.last_published = None
            self._send_ready(hosted, manifest)

        self._guard(hosted, "begin_lineage", begin)

    def _reload(self, hosted: Hosted) -> None:
        """Back to the last checkpoint, or to the beginning; nothing of it is published."""
        assert self._welcome is not None
        report = hosted.checkpoints.load_latest(hosted.trainer)
        if report.step is None:
            self._rebuild(hosted)
        hosted.lineage = hosted.base_lineage = report.lineage
        hosted.failure, hosted.damaged = "", damaged_in(report)
        hosted.manifest = hosted.last_done = hosted.last_published = None

    def _rebuild(self, hosted: Hosted) -> None:
        """Begin again with the model's folder; without the trainer that was, as two may not fit into memory.

        Where that fails the process ends: its successor tries it with all the memory there is.
        """
        assert self._welcome is not None
        del hosted.trainer
        free_garbage()
        try:
            hosted.trainer = build_trainer(self._welcome, hosted.spec, bases=self._bases)
        except FAILURES as error:
            logger.exception("policy %s cannot begin again", hosted.spec.name)
            raise SystemExit(f"error: policy {hosted.spec.name} cannot begin again: {error}") from error

    def _on_save(self, message: SaveCheckpoint) -> None:
        hosted = self._hosted[message.policy]

        def save() -> None:
            if hosted.failure:
                raise UnavailableError("the last step failed: there is nothing whole to save")
            path = hosted.checkpoints.save(hosted.trainer, lineage=hosted.lineage)
            hosted.damaged = ()  # they went with it
            self._send(
                CheckpointSaved(policy=message.policy, step=hosted.trainer.step, path=str(path), lineage=hosted.lineage)
            )

        self._guard(hosted, "save_checkpoint", save)

    def _on_export(self, message: Export) -> None:
        hosted = self._hosted[message.policy]

        def export() -> None:
            path = Path(message.path)
            if hosted.trainer.lora is None:
                hosted.trainer.export(path)
            else:  # the merged model serves as any `model`; the adapter is what PEFT loads
                hosted.trainer.export(path, merged=True)
                hosted.trainer.export(path.with_name(f"{path.name}-adapter"))
            self._send(Exported(policy=message.policy, step=hosted.trainer.step, path=message.path))

        self._guard(hosted, "export", export)

    def _on_release(self, message: ReleaseVersion) -> None:
        """Never of what is held now: it may be served again, though nobody needed it when the message was sent."""
        hosted = self._hosted[message.policy]
        held = hosted.stands_at
        is_held = held is not None and message.version == held.version and message.checksum in ("", held.checksum)
        if not is_held:
            hosted.publishing.publisher.release(message.version, checksum=message.checksum)

    def _on_keep(self, message: KeepVersions) -> None:
        hosted = self._hosted[message.policy]
        hosted.publishing.publisher.keep(message.checksums)

    def _on_shutdown(self, message: Shutdown) -> None:
        self._stopped = True

    def _guard(self, hosted: Hosted, command: str, action: Callable[[], None]) -> None:
        """Run a command; a failure is reported by name, and the process goes on."""
        try:
            action()
        except FAILURES as error:
            name = hosted.spec.name
            logger.exception("%s of policy %s failed", command, name)
            self._send(Failed(policy=name, command=command, error=f"{type(error).__name__}: {error}"))


def damaged_in(report: LoadReport) -> tuple[str, ...]:
    """What a load skipped, for people."""
    return tuple(f"{skipped.path}: {skipped.reason}" for skipped in report.skipped)


def build_trainer(welcome: Welcome, spec: PolicySpec, *, bases: SharedBases) -> PolicyTrainer | DistributedTrainer:
    """A policy as its model folder has it; ``bases`` holds what those of a group share."""
    config = PolicyConfig.model_validate(spec.config)
    if config.trainer.processes > 1:
        return DistributedTrainer.start(welcome, spec)
    return PolicyTrainer(
        Path(spec.model),
        config=config,
        total_steps=welcome.total_steps,
        seed=welcome.seed,
        device=resolve_device(config.trainer.device),
        dtype=getattr(torch, config.dtype),
        bases=bases if group_of(config) is not None else None,
    )


def main() -> None:
    """Entry point of the process."""
    arguments = WorkerArguments.parse()
    run_worker("trainer", arguments, partial(TrainerWorker, carry=Uploads(arguments.url, arguments.key).carry))
