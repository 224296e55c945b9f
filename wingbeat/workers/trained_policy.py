"""One policy of a trainer process: its trainer, its checkpoints, what of it is published, what it says of itself.

It does what it is told, at once and on the caller's thread.  What comes when, and what is waited for, is the affair of
:class:`~wingbeat.workers.trainer.TrainerWorker`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError

from wingbeat.core.config import PolicyConfig, WeightsConfig
from wingbeat.core.config.lora_groups import group_of
from wingbeat.core.errors import UnavailableError, WingbeatError
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.weight_protocol import AdapterInfo, KeepVersions, Manifest, Published, ReleaseVersion
from wingbeat.core.worker_protocol import (
    CheckpointSaved,
    Exported,
    Failed,
    PolicySpec,
    StepDone,
    TrainerReady,
    Welcome,
    WorkerMessage,
)
from wingbeat.trainer.checkpoint import CheckpointStore, LoadReport
from wingbeat.trainer.memory import free_garbage
from wingbeat.trainer.shared_base import SharedBases
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.weights.host import run_weights_dir
from wingbeat.weights.overlap import Carry, OverlappedPublisher, Version, stay
from wingbeat.weights.publish import WeightPublisher
from wingbeat.weights.upload import UploadRefused
from wingbeat.workers.distributed import DistributedTrainer
from wingbeat.workers.main import resolve_device

logger = logging.getLogger(__name__)

VERSIONS_HELD = 4
"""Served, being loaded, being published, and pinned for an evaluation: what must fit into shared memory at once."""
FAILURES = (WingbeatError, OSError, SafetensorError, RuntimeError, ValueError)
"""What a command may raise without ending the process."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the process gives to each of its policies."""

    welcome: Welcome
    """Of the control that the policy was loaded for; another one of the same run says the same."""
    host_id: str
    send: Callable[..., None]
    on_publish_ended: Callable[[str, BaseException | None], None]
    """Of a policy; called on the publishing thread once it is free again, with what ended it."""
    carry: Carry
    sleep: Callable[[float], None]
    bases: SharedBases


class TrainedPolicy:
    """Loaded from its last checkpoint, or from its model folder, on construction."""

    def __init__(self, spec: PolicySpec, surroundings: Surroundings) -> None:
        self.spec = spec
        self._surroundings = surroundings
        welcome, config = surroundings.welcome, PolicyConfig.model_validate(spec.config)
        self.trainer = build_trainer(welcome, spec, bases=surroundings.bases)
        keep = config.trainer.keep_checkpoints
        self._checkpoints = CheckpointStore(Path(welcome.run_dir) / "checkpoints" / spec.name, keep=keep)
        report = self._checkpoints.load_latest(self.trainer)
        self._lineage = self._base_lineage = report.lineage
        """Of the weights: that of the last step, or one that has only begun; and the one before that."""
        self._damaged = damaged_in(report)
        """Checkpoints that could not be used, each with the reason."""
        self.publishing = self._publisher(welcome)
        self._manifest: Manifest | None = None
        """Of what was published last, maybe a step behind the weights."""
        self.failure = ""
        """Why the last step failed, if it did: the weights may be half a step further than they are called."""
        self.refusal: UploadRefused | None = None
        """Why what was published last reaches nobody, if it does not."""
        self._last_refusal: UploadRefused | None = None
        """What control was told: the publishing thread's word of it may come after the next version has begun."""
        self._last_done: StepDone | None = None
        self._last_published: Published | None = None

    def _publisher(self, welcome: Welcome) -> OverlappedPublisher:
        given, name = self._surroundings, self.spec.name
        folder = run_weights_dir(welcome.run_dir, min_free_bytes=VERSIONS_HELD * self.trainer.published_bytes)
        chain = WeightsConfig.model_validate(welcome.weights).delta_chain
        return OverlappedPublisher(
            WeightPublisher(folder, host_id=given.host_id, policy=name, delta_chain=chain),
            on_published=self._on_published,
            on_trouble=lambda text: given.send(Failed(policy=name, command="publish_weights", error=text)),
            on_ended=lambda error: given.on_publish_ended(name, error),
            carry=stay if welcome.host_id == given.host_id else given.carry,
            sleep=given.sleep,
        )

    # --- what it says -------------------------------------------------------------------------

    @property
    def stands_at(self) -> Manifest | None:
        """Of the weights as they are; None where they are not published."""
        manifest = self._manifest
        return manifest if manifest is not None and manifest.version == self.trainer.step else None

    def ready(self) -> TrainerReady:
        """Where it stands; its weights are published."""
        manifest = self.stands_at
        assert manifest is not None, "the caller saw to that"
        return TrainerReady(
            policy=self.spec.name,
            step=self.trainer.step,
            manifest=manifest,
            base_lineage=self._base_lineage,
            damaged=self._damaged,
        )

    def last_said(self) -> tuple[WorkerMessage, ...]:
        """Of the last step: to be said again after a reconnection, as control may not have lived to hear it."""
        if self._last_done is None:
            return ()
        return (self._last_done,) if self._last_published is None else (self._last_done, self._last_published)

    # --- training -----------------------------------------------------------------------------

    def take_step(self, batch: TrainingBatch) -> StepDone:
        """Raises what is in :data:`FAILURES`; until it is loaded anew nothing but that comes of it then."""
        if self.refusal is not None:
            raise UnavailableError(f"step {batch.step} is not taken, as nobody receives the weights: {self.refusal}")
        if self.failure:
            raise UnavailableError(f"step {batch.step} is not taken: a step before it failed: {self.failure}")
        started = time.time()
        self.failure = "it did not end"
        try:
            result = self.trainer.train_step(batch)
        except FAILURES as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        self.failure = ""
        self._lineage = self._base_lineage = batch.lineage
        self._last_published = None
        self._last_done = StepDone(
            policy=batch.policy,
            batch_id=batch.batch_id,
            step=batch.step,
            metrics=dict(result.metrics),
            advantages=dict(result.advantages),
            started_s=started,
            ended_s=time.time(),
        )
        return self._last_done

    def begin_lineage(self, lineage: int) -> TrainerReady:
        """The weights, which are published, are the first of another lineage."""
        manifest = self.stands_at
        assert manifest is not None, "the caller saw to that"
        self._base_lineage, self._lineage = self._lineage, lineage
        self._manifest = msgspec.structs.replace(manifest, lineage=lineage)
        self._last_done = self._last_published = None
        return self.ready()

    def reload(self) -> None:
        """Back to the last checkpoint, or to the beginning; nothing of it is published."""
        report = self._checkpoints.load_latest(self.trainer)
        if report.step is None:
            self._rebuild()
        self._lineage = self._base_lineage = report.lineage
        self.failure, self._damaged = "", damaged_in(report)
        self._manifest = self._last_done = self._last_published = None

    def _rebuild(self) -> None:
        """Begin again with the model's folder; without the trainer that was, as two may not fit into memory.

        Where that fails the process ends: its successor tries it with all the memory there is.
        """
        given = self._surroundings
        del self.trainer
        free_garbage()
        try:
            self.trainer = build_trainer(given.welcome, self.spec, bases=given.bases)
        except FAILURES as error:
            logger.exception("policy %s cannot begin again", self.spec.name)
            raise SystemExit(f"error: policy {self.spec.name} cannot begin again: {error}") from error

    # --- publishing ---------------------------------------------------------------------------

    def publish(self, *, delta: bool = False) -> None:
        """Begin to publish the weights as they are; nothing else is on its way."""
        self.refusal = None
        lora = self.trainer.lora
        self.publishing.start(
            self.trainer.published_tensors(),
            Version(
                version=self.trainer.step,
                lineage=self._lineage,
                kind=self.trainer.kind,
                base_model=self.spec.model,
                adapter=None if lora is None else AdapterInfo(rank=lora.rank, alpha=lora.alpha),
                delta=delta,
            ),
        )

    def refused(self, error: UploadRefused) -> None:
        """What was published last reaches nobody; control is told once, however often it is found."""
        if error is self._last_refusal:
            return
        self.refusal = self._last_refusal = error
        logger.error("the weights of policy %s reach nobody: %s", self.spec.name, error)
        failed = Failed(policy=self.spec.name, command="publish_weights", error=error.message, final=True)
        self._surroundings.send(failed)

    def _on_published(self, manifest: Manifest, seconds: float) -> None:
        """On the publishing thread."""
        self._manifest = manifest
        self._last_published = Published(manifest.policy, manifest.version, manifest, seconds)
        self._surroundings.send(self._last_published)

    def release(self, message: ReleaseVersion) -> None:
        """Never of what is held now: it may be served again, though nobody needed it when the message was sent."""
        held = self.stands_at
        is_held = held is not None and message.version == held.version and message.checksum in ("", held.checksum)
        if not is_held:
            self.publishing.publisher.release(message.version, checksum=message.checksum)

    def keep(self, message: KeepVersions) -> None:
        """Release all versions but these."""
        self.publishing.publisher.keep(message.checksums)

    # --- files --------------------------------------------------------------------------------

    def save(self) -> CheckpointSaved:
        """Raises what is in :data:`FAILURES`."""
        if self.failure:
            raise UnavailableError("the last step failed: there is nothing whole to save")
        path = self._checkpoints.save(self.trainer, lineage=self._lineage)
        self._damaged = ()  # they went with it
        return CheckpointSaved(policy=self.spec.name, step=self.trainer.step, path=str(path), lineage=self._lineage)

    def export(self, path: Path) -> Exported:
        """Raises what is in :data:`FAILURES`."""
        if self.trainer.lora is None:
            self.trainer.export(path)
        else:  # the merged model serves as any `model`; the adapter is what PEFT loads
            self.trainer.export(path, merged=True)
            self.trainer.export(path.with_name(f"{path.name}-adapter"))
        return Exported(policy=self.spec.name, step=self.trainer.step, path=str(path))


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
