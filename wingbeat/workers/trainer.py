"""``python -m wingbeat.workers.trainer``: one process that optimises one policy.

It publishes its weights once on start and after every step; control decides what is trained when.
Commands are executed in the order they come, on the compute thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError

from wingbeat.core.config import PolicyConfig
from wingbeat.core.errors import UnavailableError, WingbeatError
from wingbeat.core.worker_protocol import (
    AdapterInfo,
    BeginLineage,
    CheckpointSaved,
    Export,
    Exported,
    Failed,
    Heartbeat,
    KeepVersions,
    Manifest,
    PolicySpec,
    ReleaseVersion,
    SaveCheckpoint,
    Shutdown,
    StepDone,
    TrainerReady,
    TrainStep,
    Welcome,
)
from wingbeat.trainer.checkpoint import CheckpointStore, LoadReport
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.weights.host import run_weights_dir
from wingbeat.weights.publish import NoRoom, WeightPublisher
from wingbeat.workers.link import Connected, Disconnected, Inbound
from wingbeat.workers.main import WorkerArguments, resolve_device, run_worker

logger = logging.getLogger(__name__)

VERSIONS_HELD = 3
"""Live, being published, and pinned for an evaluation: what must fit into shared memory at once."""
PUBLISH_RETRY_S = 1.0
"""Between attempts to publish into a full folder."""
FAILURES = (WingbeatError, OSError, SafetensorError, RuntimeError, ValueError)
"""What a command may raise without ending the process."""
MAKES_ROOM = ReleaseVersion | KeepVersions


@dataclass(slots=True)
class Hosted:
    """Everything that belongs to the one policy of this process."""

    spec: PolicySpec
    trainer: PolicyTrainer
    checkpoints: CheckpointStore
    publisher: WeightPublisher
    manifest: Manifest
    lineage: int = 0
    """Of the weights: that of the last step, or one that has only begun."""
    base_lineage: int = 0
    """The lineage before it, where it has only begun."""
    failure: str = ""
    """Why the last step failed, if it did: the weights may be half a step further than they are called."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that could not be used, each with the reason."""
    last_done: StepDone | None = None
    """Said again after a reconnection: control may not have lived to hear it."""


class TrainerWorker:
    """The compute side: executes control's commands one by one."""

    def __init__(self, host_id: str, send: Callable[..., None], *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._host_id = host_id
        self._send = send
        self._sleep = sleep
        self._hosted: Hosted | None = None
        self._welcome: Welcome | None = None
        self._receive: Callable[..., list[Inbound]] = lambda **how: []
        self._inbox: deque[Inbound] = deque()
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
                message = self._inbox.popleft()
                started = time.perf_counter()
                self._handlers[type(message)](message)
                self._busy_s += time.perf_counter() - started
        finally:
            if self._hosted is not None:
                self._hosted.publisher.close()

    def _make_room(self) -> None:
        """Versions are released before all else that waits: many steps may be queued (a replay), each with a file."""
        waiting = tuple(self._inbox)
        for message in waiting if self._hosted is not None else ():
            if isinstance(message, MAKES_ROOM):
                self._inbox.remove(message)
                self._handlers[type(message)](message)

    def heartbeat(self) -> Heartbeat:
        """Called on the I/O thread; only reads."""
        busy, self._busy_s = self._busy_s, 0.0
        return Heartbeat(busy_s=busy)

    def _on_connected(self, message: Connected) -> None:
        self._welcome = message.welcome
        if self._hosted is None:
            self._hosted = self._load(message.welcome)
        hosted = self._hosted
        self._send_ready(hosted)
        if hosted.last_done is not None:
            self._send(hosted.last_done)

    def _send_ready(self, hosted: Hosted) -> None:
        self._send(
            TrainerReady(
                policy=hosted.spec.name,
                step=hosted.trainer.step,
                manifest=hosted.manifest,
                base_lineage=hosted.base_lineage,
                damaged=hosted.damaged,
            )
        )

    def _load(self, welcome: Welcome) -> Hosted:
        """Build the policy from its folder, restore the last checkpoint, publish what it then is."""
        (spec,) = welcome.policies
        config = PolicyConfig.model_validate(spec.config)
        trainer = build_trainer(welcome)
        checkpoints = CheckpointStore(
            Path(welcome.run_dir) / "checkpoints" / spec.name, keep=config.trainer.keep_checkpoints
        )
        report = checkpoints.load_latest(trainer)
        lineage = report.lineage
        version_bytes = sum(tensor.nbytes for tensor in trainer.published_tensors().values())
        folder = run_weights_dir(welcome.run_dir, min_free_bytes=VERSIONS_HELD * version_bytes)
        publisher = WeightPublisher(folder, host_id=self._host_id, policy=spec.name)
        manifest = _publish(spec, trainer, publisher, lineage=lineage)
        return Hosted(
            *(spec, trainer, checkpoints, publisher, manifest),
            lineage=lineage,
            base_lineage=lineage,
            damaged=damaged_in(report),
        )

    def _on_train_step(self, message: TrainStep) -> None:
        hosted = self._require()
        batch = message.batch

        def step() -> None:
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
            hosted.manifest = self._publish_when_there_is_room(hosted)
            hosted.last_done = StepDone(
                policy=batch.policy,
                batch_id=batch.batch_id,
                step=batch.step,
                manifest=hosted.manifest,
                metrics=dict(result.metrics),
                advantages=dict(result.advantages),
                started_s=started,
                ended_s=time.time(),
            )
            self._send(hosted.last_done)

        self._guard("train_step", step)

    def _publish_when_there_is_room(self, hosted: Hosted) -> Manifest:
        """A full folder does not undo a step: control is told, and it is tried again until there is room.

        Meanwhile versions are released, which makes room; all else waits its turn.  Raises UnavailableError
        where this process is told to end first.
        """
        is_told = False
        while True:
            try:
                return _publish(hosted.spec, hosted.trainer, hosted.publisher, lineage=hosted.lineage)
            except NoRoom as error:
                if not is_told:
                    self._send(Failed(policy=hosted.spec.name, command="publish_weights", error=str(error)))
                is_told = True
            self._inbox.extend(self._receive(block=False))
            self._make_room()
            self._stopped = any(isinstance(message, Shutdown) for message in self._inbox)
            if self._stopped:
                raise UnavailableError("told to end before there was room for the weights")
            self._sleep(PUBLISH_RETRY_S)

    def _on_begin_lineage(self, message: BeginLineage) -> None:
        hosted = self._require()

        def begin() -> None:
            if hosted.failure:
                self._reload(hosted)
            hosted.base_lineage, hosted.lineage = hosted.lineage, message.lineage
            hosted.manifest = msgspec.structs.replace(hosted.manifest, lineage=message.lineage)
            hosted.last_done = None
            self._send_ready(hosted)

        self._guard("begin_lineage", begin)

    def _reload(self, hosted: Hosted) -> None:
        """Back to the last checkpoint, or to the beginning."""
        assert self._welcome is not None
        report = hosted.checkpoints.load_latest(hosted.trainer)
        if report.step is None:
            hosted.trainer = build_trainer(self._welcome)
        hosted.lineage, hosted.failure, hosted.damaged = report.lineage, "", damaged_in(report)
        hosted.manifest = self._publish_when_there_is_room(hosted)

    def _on_save(self, message: SaveCheckpoint) -> None:
        hosted = self._require()

        def save() -> None:
            if hosted.failure:
                raise UnavailableError("the last step failed: there is nothing whole to save")
            path = hosted.checkpoints.save(hosted.trainer, lineage=hosted.lineage)
            hosted.damaged = ()  # they went with it
            self._send(
                CheckpointSaved(policy=message.policy, step=hosted.trainer.step, path=str(path), lineage=hosted.lineage)
            )

        self._guard("save_checkpoint", save)

    def _on_export(self, message: Export) -> None:
        hosted = self._require()

        def export() -> None:
            path = Path(message.path)
            if hosted.trainer.lora is None:
                hosted.trainer.export(path)
            else:  # the merged model serves as any `model`; the adapter is what PEFT loads
                hosted.trainer.export(path, merged=True)
                hosted.trainer.export(path.with_name(f"{path.name}-adapter"))
            self._send(Exported(policy=message.policy, step=hosted.trainer.step, path=message.path))

        self._guard("export", export)

    def _on_release(self, message: ReleaseVersion) -> None:
        """Never of what is held now: it may be served again, though nobody needed it when the message was sent."""
        hosted = self._require()
        held = hosted.manifest
        is_held = message.version == held.version == hosted.trainer.step and message.checksum in ("", held.checksum)
        if not is_held:
            hosted.publisher.release(message.version, checksum=message.checksum)

    def _on_keep(self, message: KeepVersions) -> None:
        hosted = self._require()
        hosted.publisher.keep({*message.checksums, hosted.manifest.checksum})

    def _on_shutdown(self, message: Shutdown) -> None:
        self._stopped = True

    def _require(self) -> Hosted:
        assert self._hosted is not None, "control sends commands only after the welcome"
        return self._hosted

    def _guard(self, command: str, action: Callable[[], None]) -> None:
        """Run a command; a failure is reported by name, and the process goes on."""
        try:
            action()
        except FAILURES as error:
            logger.exception("%s failed", command)
            self._send(
                Failed(policy=self._require().spec.name, command=command, error=f"{type(error).__name__}: {error}")
            )


def damaged_in(report: LoadReport) -> tuple[str, ...]:
    """What a load skipped, for people."""
    return tuple(f"{skipped.path}: {skipped.reason}" for skipped in report.skipped)


def build_trainer(welcome: Welcome) -> PolicyTrainer:
    """The policy as its model folder has it."""
    (spec,) = welcome.policies
    config = PolicyConfig.model_validate(spec.config)
    return PolicyTrainer(
        Path(spec.model),
        config=config,
        total_steps=welcome.total_steps,
        seed=welcome.seed,
        device=resolve_device(config.trainer.device),
        dtype=getattr(torch, config.dtype),
    )


def _publish(spec: PolicySpec, trainer: PolicyTrainer, publisher: WeightPublisher, *, lineage: int) -> Manifest:
    lora = trainer.lora
    manifest = publisher.publish(
        trainer.published_tensors(),
        version=trainer.step,
        kind="full" if lora is None else "adapter",
        base_model=spec.model,
        adapter=None if lora is None else AdapterInfo(rank=lora.rank, alpha=lora.alpha),
    )
    return msgspec.structs.replace(manifest, lineage=lineage)


def main() -> None:
    """Entry point of the process."""
    run_worker("trainer", WorkerArguments.parse(), TrainerWorker)


if __name__ == "__main__":
    main()
