"""``python -m wingbeat.workers.trainer``: one process that optimises one policy.

It publishes its weights once on start and after every step; control decides what is trained when.
Commands are executed in the order they come, on the compute thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wingbeat.core.config import PolicyConfig
from wingbeat.core.errors import WingbeatError
from wingbeat.core.worker_protocol import (
    AdapterInfo,
    CheckpointSaved,
    Export,
    Exported,
    Failed,
    Heartbeat,
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
from wingbeat.trainer.checkpoint import CheckpointStore
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.weights.host import run_weights_dir
from wingbeat.weights.publish import WeightPublisher
from wingbeat.workers.link import Connected, Disconnected, Inbound
from wingbeat.workers.main import WorkerArguments, resolve_device, run_worker

logger = logging.getLogger(__name__)

VERSIONS_HELD = 3
"""Live, being published, and pinned for an evaluation: what must fit into shared memory at once."""


@dataclass(slots=True)
class Hosted:
    """Everything that belongs to the one policy of this process."""

    spec: PolicySpec
    trainer: PolicyTrainer
    checkpoints: CheckpointStore
    publisher: WeightPublisher
    manifest: Manifest
    last_done: StepDone | None = None
    """Said again after a reconnection: control may not have lived to hear it."""


class TrainerWorker:
    """The compute side: executes control's commands one by one."""

    def __init__(self, host_id: str, send: Callable[..., None]) -> None:
        self._host_id = host_id
        self._send = send
        self._hosted: Hosted | None = None
        self._busy_s = 0.0
        self._stopped = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Connected: self._on_connected,
            Disconnected: lambda message: None,
            TrainStep: self._on_train_step,
            SaveCheckpoint: self._on_save,
            Export: self._on_export,
            ReleaseVersion: self._on_release,
            Shutdown: self._on_shutdown,
        }

    def run(self, receive: Callable[..., list[Inbound]]) -> None:
        """Serve until told to shut down."""
        try:
            while not self._stopped:
                for message in receive(block=True):
                    started = time.perf_counter()
                    self._handlers[type(message)](message)
                    self._busy_s += time.perf_counter() - started
        finally:
            if self._hosted is not None:
                self._hosted.publisher.close()

    def heartbeat(self) -> Heartbeat:
        """Called on the I/O thread; only reads."""
        busy, self._busy_s = self._busy_s, 0.0
        return Heartbeat(busy_s=busy)

    def _on_connected(self, message: Connected) -> None:
        if self._hosted is None:
            self._hosted = self._load(message.welcome)
        hosted = self._hosted
        self._send(TrainerReady(policy=hosted.spec.name, step=hosted.trainer.step, manifest=hosted.manifest))
        if hosted.last_done is not None:
            self._send(hosted.last_done)

    def _load(self, welcome: Welcome) -> Hosted:
        """Build the policy from its folder, restore the last checkpoint, publish what it then is."""
        (spec,) = welcome.policies
        config = PolicyConfig.model_validate(spec.config)
        trainer = PolicyTrainer(
            Path(spec.model),
            config=config,
            total_steps=welcome.total_steps,
            seed=welcome.seed,
            device=resolve_device(config.trainer.device),
            dtype=getattr(torch, config.dtype),
        )
        checkpoints = CheckpointStore(
            Path(welcome.run_dir) / "checkpoints" / spec.name, keep=config.trainer.keep_checkpoints
        )
        checkpoints.load_latest(trainer)
        version_bytes = sum(tensor.nbytes for tensor in trainer.published_tensors().values())
        folder = run_weights_dir(welcome.run_dir, min_free_bytes=VERSIONS_HELD * version_bytes)
        publisher = WeightPublisher(folder, host_id=self._host_id, policy=spec.name)
        return Hosted(spec, trainer, checkpoints, publisher, _publish(spec, trainer, publisher))

    def _on_train_step(self, message: TrainStep) -> None:
        hosted = self._require()
        batch = message.batch

        def step() -> None:
            started = time.time()
            result = hosted.trainer.train_step(batch)
            hosted.manifest = _publish(hosted.spec, hosted.trainer, hosted.publisher)
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

    def _on_save(self, message: SaveCheckpoint) -> None:
        hosted = self._require()

        def save() -> None:
            path = hosted.checkpoints.save(hosted.trainer)
            self._send(CheckpointSaved(policy=message.policy, step=hosted.trainer.step, path=str(path)))

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
        self._require().publisher.release(message.version)

    def _on_shutdown(self, message: Shutdown) -> None:
        self._stopped = True

    def _require(self) -> Hosted:
        assert self._hosted is not None, "control sends commands only after the welcome"
        return self._hosted

    def _guard(self, command: str, action: Callable[[], None]) -> None:
        """Run a command; a failure is reported by name, and the process goes on."""
        try:
            action()
        except (WingbeatError, OSError, RuntimeError, ValueError) as error:
            logger.exception("%s failed", command)
            self._send(
                Failed(policy=self._require().spec.name, command=command, error=f"{type(error).__name__}: {error}")
            )


def _publish(spec: PolicySpec, trainer: PolicyTrainer, publisher: WeightPublisher) -> Manifest:
    lora = trainer.lora
    return publisher.publish(
        trainer.published_tensors(),
        version=trainer.step,
        kind="full" if lora is None else "adapter",
        base_model=spec.model,
        adapter=None if lora is None else AdapterInfo(rank=lora.rank, alpha=lora.alpha),
    )


def main() -> None:
    """Entry point of the process."""
    run_worker("trainer", WorkerArguments.parse(), TrainerWorker)


if __name__ == "__main__":
    main()
