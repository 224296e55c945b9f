"""One policy as control sees it: its clock (version), its buffer, its trainer and the step loop.

    waits for                                   unblocked by
    a trainer                                   TrainerReady
    enough groups, staleness permitting         a group closing, an older group ending
    the step's end                              StepDone (also after a crash: by replaying logged steps)

Every step's batch is in the ledger before the trainer sees it.  A trainer that comes back at an
earlier step is sent the logged batches again, in order, until it stands where control stands.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from wingbeat.core.config import PolicyConfig
from wingbeat.core.events import EventLog
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.worker_protocol import (
    CheckpointSaved,
    ControlMessage,
    Export,
    Exported,
    Failed,
    Manifest,
    PolicySpec,
    ReleaseVersion,
    SaveCheckpoint,
    StepDone,
    TrainerReady,
    TrainStep,
)
from wingbeat.dataflow.buffer import BatchDraft, PolicyBuffer
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.operators import has_zero_variance
from wingbeat.dataflow.records import ReadyGroup
from wingbeat.dataflow.staleness import StalenessGate
from wingbeat.server.engines import EnginePool
from wingbeat.server.signals import Changed, OverlapMeter
from wingbeat.tracking.template import ChatTemplate

logger = logging.getLogger(__name__)


class TrainerState(StrEnum):
    """Where a policy's trainer is."""

    FROZEN = "frozen"
    ABSENT = "absent"
    READY = "ready"
    TRAINING = "training"
    REPLAYING = "replaying"


@dataclass(frozen=True, slots=True)
class HostContext:
    """What all policies of one control share."""

    ledger: Ledger
    engines: EnginePool
    events: EventLog
    overlap: OverlapMeter
    changed: Changed
    watch: Callable[[Future[Any]], None]
    """Takes ledger writes that nobody waits for: a failure must not go unseen."""
    seed: int
    total_steps: int
    clock: Callable[[], float]


class StepListener(Protocol):
    """Told after every finished step, before the next begins (evaluation, progress)."""

    async def __call__(self, host: PolicyHost, metrics: dict[str, float]) -> None: ...


class PolicyHost:
    """Owns one policy; all methods run on control's event loop."""

    def __init__(
        self,
        spec: PolicySpec,
        *,
        template: ChatTemplate,
        buffer: PolicyBuffer,
        gate: StalenessGate,
        context: HostContext,
        running_floors: Callable[[str], list[int]],
        straggler_wait_s: float,
    ) -> None:
        self.spec = spec
        self.config = PolicyConfig.model_validate(spec.config)
        self.template = template
        self.buffer = buffer
        self.version = 0
        self.manifest: Manifest | None = None
        self.state = TrainerState.ABSENT if self.config.trainable else TrainerState.FROZEN
        self.trainer_id = ""
        """The worker that last connected as this policy's trainer."""
        self.halted = ""
        """Why training stopped for good, if it did."""
        self.trained_tokens = 0
        self.equal_groups = 0
        """Groups in a row whose rewards were all equal."""
        self.staleness_max = 0
        self._gate = gate
        self._context = context
        self._running_floors = running_floors
        self._straggler_wait_s = straggler_wait_s
        self._trainer: Callable[[ControlMessage], None] | None = None
        self._manifests: dict[int, Manifest] = {}
        self._pins: Counter[int] = Counter()
        self._step_done: asyncio.Future[StepDone | None] | None = None
        """Resolves to None where the step failed."""
        self._exports: dict[str, asyncio.Future[Exported]] = {}
        self._checkpoints: dict[int, asyncio.Future[CheckpointSaved]] = {}
        self._in_step = False
        """From the moment a batch left the buffer until its version counts."""
        self._is_behind = False
        """The trainer is repeating logged steps up to ours."""
        self._waiting_since: float | None = None
        if not self.config.trainable:
            self._adopt(base_manifest(spec, self.version))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def has_trainer(self) -> bool:
        return self._trainer is not None

    @property
    def complete(self) -> bool:
        return not self.config.trainable or self.version >= self._context.total_steps or bool(self.halted)

    def manifest_of(self, version: int) -> Manifest | None:
        """The manifest of a version whose file still exists."""
        return self._manifests.get(version)

    # --- the trainer --------------------------------------------------------------------------

    def trainer_joined(self, send: Callable[[ControlMessage], None], *, worker_id: str = "") -> None:
        """A trainer is connected; a worker that returns takes its own earlier connection over."""
        if self._trainer is not None:
            self.trainer_left()
        self.trainer_id = worker_id
        self._trainer = send

    def trainer_left(self, send: Callable[[ControlMessage], None] | None = None) -> None:
        """The trainer died; the step in progress will be replayed to its successor.

        ``send`` names the one that left: nothing happens where a successor took over already.
        """
        if send is not None and self._trainer is not send:
            return
        self._trainer = None
        if self.state is not TrainerState.FROZEN:
            self.state = TrainerState.ABSENT
        for future in (*self._exports.values(), *self._checkpoints.values()):
            if not future.done():
                future.set_exception(ConnectionError(f"the trainer of {self.name!r} went away"))
        self._exports.clear()
        self._checkpoints.clear()
        self._context.events.emit("trainer_lost", policy=self.name, version=self.version)
        self._context.changed.notify()

    def trainer_ready(self, message: TrainerReady) -> None:
        """Bring a (new or returned) trainer to where control stands."""
        assert self._trainer is not None
        self._context.events.emit("trainer_ready", policy=self.name, step=message.step, version=self.version)
        if message.step > self.version:
            # It ended a step of which we did not hear (control or the link died meanwhile): its StepDone follows.
            self.state = TrainerState.TRAINING
            self._context.changed.notify()
            return
        self._is_behind = message.step < self.version
        if message.step == self.version:
            self._adopt(message.manifest)
        else:
            self._release_unknown(message.step)
        missing = self._context.ledger.batches_after(self.name, message.step)
        for batch in missing:
            self._trainer(TrainStep(batch=batch, replay=True))
        self.state = TrainerState.REPLAYING if missing else TrainerState.READY
        self._context.changed.notify()

    def step_done(self, message: StepDone) -> None:
        if message.step < self.version:
            self._release_unknown(message.step)
            return
        if message.step == self.version:
            if self._is_behind:
                self._caught_up(message)
            return
        if self._step_done is not None and not self._step_done.done():
            self._step_done.set_result(message)

    def _release_unknown(self, version: int) -> None:
        """Delete a file that only a replay made; one that is still known may be pinned."""
        if self._trainer is not None and version not in self._manifests:
            self._trainer(ReleaseVersion(policy=self.name, version=version))

    def _caught_up(self, message: StepDone) -> None:
        """A replay reached the step that control stands at: the weights must be the same bytes."""
        exact = self.manifest is None or self.manifest.checksum == message.manifest.checksum
        self._context.events.emit("replayed", policy=self.name, step=message.step, exact=exact)
        self._is_behind = False
        self._adopt(message.manifest)
        if not self._in_step:
            self.state = TrainerState.READY
            self._context.changed.notify()

    def checkpoint_saved(self, message: CheckpointSaved) -> None:
        self._context.watch(self._context.ledger.record_checkpoint(self.name, step=message.step, path=message.path))
        self._context.events.emit("checkpoint", policy=self.name, step=message.step, path=message.path)
        future = self._checkpoints.pop(message.step, None)
        if future is not None and not future.done():
            future.set_result(message)

    def exported(self, message: Exported) -> None:
        future = self._exports.pop(message.path, None)
        if future is not None and not future.done():
            future.set_result(message)

    def failed(self, message: Failed) -> None:
        """A command failed at the trainer: a failed step ends training, with its reason in the status."""
        self._context.events.emit("trainer_failed", policy=self.name, command=message.command, error=message.error)
        error = RuntimeError(f"{message.command} failed: {message.error}")
        if message.command == "train_step":
            self.halted = f"training of {self.name!r} stopped: {message.error}"
            if self._step_done is not None and not self._step_done.done():
                self._step_done.set_result(None)
        pending = self._exports if message.command == "export" else self._checkpoints
        if message.command in ("export", "save_checkpoint"):
            for future in pending.values():
                if not future.done():
                    future.set_exception(error)
            pending.clear()
        self._context.changed.notify()

    def add_group(self, group: ReadyGroup) -> None:
        """A group of this policy closed."""
        self.equal_groups = self.equal_groups + 1 if has_zero_variance(group) else 0
        self.buffer.add(group)

    # --- the step loop ------------------------------------------------------------------------

    async def run(self, after_step: StepListener) -> None:
        """Train until the run is complete, or a step fails."""
        unfinished = self._context.ledger.batches_after(self.name, self.version)  # logged before a restart
        while unfinished or not self.complete:
            batch = unfinished.pop(0) if unfinished else await self._log(await self._next_draft())
            done = await self._train(batch)
            if done is None:
                return
            await self._account(done)
            await after_step(self, done.metrics)

    async def _next_draft(self) -> BatchDraft:
        while True:
            if self.state is TrainerState.READY and self._may_step():
                draft = self.buffer.take(self.version)
                if draft is not None:
                    self._waiting_since = None
                    self._in_step = True
                    return draft
            await self._context.changed.wait(1.0 if self._waiting_since is not None else None)

    def admits_group(self) -> bool:
        """Whether one more training group may start: in time to be trained, and still needed.

        Policies that train no more (frozen, complete) admit whatever the others need.
        """
        if self.complete:
            return True
        floors = [*self._running_floors(self.name), *self.buffer.floors()]
        next_version = self.version + self._in_step
        if len(floors) >= (self._context.total_steps - next_version) * self._gate.groups_per_step:
            return False
        return self._gate.may_admit(floors, version=next_version, floor=self.lowest_version())

    def lowest_version(self) -> int:
        """The oldest version that any engine may still sample with."""
        served = self._context.engines.lowest_served(self.name)
        return self.version if served is None else min(self.version, served[0])

    def _may_step(self) -> bool:
        """The staleness rule; a straggler is waited for at most ``straggler_wait_s``."""
        in_flight, buffered = self._running_floors(self.name), self.buffer.floors()
        if len(buffered) < self._gate.groups_per_step:
            self._waiting_since = None
            return False
        if self._gate.may_step(self.version, in_flight=in_flight, buffered=buffered):
            return True
        now = self._context.clock()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since >= self._straggler_wait_s

    async def _log(self, draft: BatchDraft) -> TrainingBatch:
        """Make the step's batch durable before it is taken."""
        step = self.version + 1
        batch = TrainingBatch(
            batch_id=f"{self.name}-{step}",
            policy=self.name,
            step=step,
            episodes=draft.episodes,
            seed=(self._context.seed * 1_000_003 + step) % 2**31,
        )
        await asyncio.wrap_future(
            self._context.ledger.log_batch(batch, group_ids=draft.group_ids, dropped=draft.dropped)
        )
        return batch

    async def _train(self, batch: TrainingBatch) -> StepDone | None:
        """Take the step; without a trainer at hand, its successor is sent the batch from the ledger.

        None where the step failed.
        """
        self._in_step = True
        self._step_done = asyncio.get_running_loop().create_future()
        self._context.overlap.training(+1)
        try:
            if self._trainer is not None and self.state is TrainerState.READY:
                self.state = TrainerState.TRAINING
                self._trainer(TrainStep(batch=batch))
            return await self._step_done
        finally:
            self._context.overlap.training(-1)

    async def _account(self, done: StepDone) -> None:
        """The step counts: version, weights, ledger, metrics."""
        self.version = done.step
        self._in_step = False
        self.state = TrainerState.READY if self._trainer is not None else TrainerState.ABSENT
        self._adopt(done.manifest)
        self.trained_tokens += int(done.metrics.get("trained_tokens", 0))
        self.staleness_max = max(self.staleness_max, int(done.metrics.get("staleness/max", 0)))
        await asyncio.wrap_future(
            self._context.ledger.mark_trained(
                self.name, step=done.step, metrics=done.metrics, advantages=done.advantages
            )
        )
        every = self.config.trainer.checkpoint_every
        if self._trainer is not None and (done.step % every == 0 or done.step == self._context.total_steps):
            self._trainer(SaveCheckpoint(policy=self.name, step=done.step))
        self._context.changed.notify()

    # --- versions -----------------------------------------------------------------------------

    def _adopt(self, manifest: Manifest) -> None:
        """Serve these weights from now on."""
        if self.manifest is not None and self.manifest.version > manifest.version:
            return
        self.manifest = manifest
        self._manifests[manifest.version] = manifest
        self._context.engines.publish(manifest)
        self.release_unused()

    def release_unused(self) -> None:
        """Delete files of versions that nobody can ask for any more."""
        for version in [v for v in self._manifests if v != self.version]:
            if not self._context.engines.holds(self.name, version) and self._context.engines.has_served(
                self.name, self.version
            ):
                del self._manifests[version]
                if self._trainer is not None:
                    self._trainer(ReleaseVersion(policy=self.name, version=version))

    def pin(self, version: int) -> None:
        """Keep a version served until as many :meth:`unpin` (evaluations may share one)."""
        self._pins[version] += 1
        if self._pins[version] == 1:
            self._context.engines.pin(self._manifests[version])

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]
            self._context.engines.unpin(self.name, version)
            self.release_unused()

    def is_pinned(self, version: int) -> bool:
        return version in self._pins

    async def export(self, path: Path) -> Exported:
        """Have the trainer write a Hugging Face folder.  Raises RuntimeError where it cannot."""
        if self._trainer is None:
            raise RuntimeError(f"policy {self.name!r} has no trainer now; nothing can be exported")
        future = self._exports[str(path)] = asyncio.get_running_loop().create_future()
        self._trainer(Export(policy=self.name, path=str(path)))
        return await future


def base_manifest(spec: PolicySpec, version: int) -> Manifest:
    """The weights of the model folder itself: nothing to transport."""
    return Manifest(
        policy=spec.name,
        version=version,
        kind="full",
        path="",
        host_id="",
        checksum="base",
        size_bytes=0,
        tensors=(),
        base_model=spec.model,
    )
