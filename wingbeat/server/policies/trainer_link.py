"""One policy's trainer: it comes and goes, catches up, or goes back and begins a new lineage.

A trainer that comes back at an earlier step is sent the logged batches again, in order, until it stands where
control stands.  Where that cannot be (replay is off or fails, batches are missing, what it holds was abandoned,
its weights are not the same bytes), the trainer keeps what it has, and control goes back to it::

    control                          trainer
      BeginLineage(L + 1)  ────────▶   (a failed step: back to its checkpoint)
                           ◀────────   TrainerReady(step c, lineage L + 1, based on lineage l)
      ledger.begin_lineage, then: version c, lost samples back in the buffer, engines told

A step counts when its StepDone comes; its weights are served when its Published comes, maybe steps later.  Who dies
in between loses nothing: what was never published was never served, so no token is of it, and a replay makes it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from wingbeat.core.samples import TrainingBatch
from wingbeat.core.weight_protocol import Manifest, Published
from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    ControlMessage,
    Export,
    Exported,
    Failed,
    Shutdown,
    StepDone,
    TrainerReady,
    TrainStep,
)
from wingbeat.dataflow.lineages import Lineage
from wingbeat.server.policies.trainer_state import TrainerState

if TYPE_CHECKING:
    from wingbeat.server.policies.host import PolicyHost

Send = Callable[[ControlMessage], None]

PUBLISH, CHECKPOINT = "publish", "checkpoint"
"""Alarms beside those of ``[health]``: weights that are not published, checkpoints that are not written."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A lineage that the trainer was told to begin."""

    lineage: int
    reason: str


class TrainerLink:
    """Runs on control's event loop."""

    def __init__(self, host: PolicyHost) -> None:
        self._host = host
        self.worker_id = ""
        """The worker that last connected as this policy's trainer."""
        self.software: Mapping[str, str] = {}
        """The versions that it said it runs."""
        self.problem = ""
        """What keeps it from going on although nothing has failed for good."""
        self.is_cut_off = False
        """Nobody receives its weights, now or later; until a trainer comes whose weights are there."""
        self.warnings: list[str] = []
        """Checkpoints that it could not use."""
        self._unsaved = 0
        """Checkpoints in a row that could not be written."""
        self._send: Send | None = None
        self._given = ""
        """The batch that this connection was given last: never twice, whatever order its messages come in."""
        self._proposal: Proposal | None = None
        self._rollback: asyncio.Task[None] | None = None
        self._waiting: TrainerReady | None = None
        """Came while a rollback was being made durable."""
        self._exports: dict[str, asyncio.Future[Exported]] = {}

    @property
    def is_connected(self) -> bool:
        return self._send is not None

    @property
    def is_rolling_back(self) -> bool:
        """Between the trainer's new lineage and its record in the ledger: what waits is not known yet."""
        return self._rollback is not None

    def send(self, message: ControlMessage) -> None:
        """To the trainer, if there is one now."""
        if self._send is not None:
            self._send(message)

    def give(self, batch: TrainingBatch) -> None:
        """Have it take a step."""
        if batch.batch_id != self._given:
            self._given = batch.batch_id
            self.send(TrainStep(batch=batch, delta=self._is_pulled()))

    def _is_pulled(self) -> bool:
        """Whether engines of other hosts than the weights' own wait for what comes next."""
        context, manifest = self._host.context, self._host.manifest
        return (
            context.encodes_deltas
            and manifest is not None
            and any(link.host_id != manifest.host_id for link in context.engines.links)
        )

    def joined(self, send: Send, *, worker_id: str = "", software: Mapping[str, str] = MappingProxyType({})) -> None:
        """A trainer is connected; a worker that returns takes its own earlier connection over.

        Another process of its name that lives on (on a node that a cluster gave up, say) is told to end: two must not
        both train.
        """
        if self._send is not None:
            self._send(Shutdown(reason="another process has taken this trainer's place"))
            self.left()
        self.worker_id, self.software = worker_id, software
        self._send = send

    def is_from(self, send: Send) -> bool:
        """Whether this is the connection that counts."""
        return self._send is send

    def left(self, send: Send | None = None, *, expected: bool = False) -> None:
        """The trainer died; its successor is given the pending step.

        ``send`` names the one that left: nothing happens where a successor took over already.
        ``expected``: it was told to end, which is no loss.
        """
        if send is not None and self._send is not send:
            return
        self._send = self._proposal = self._waiting = None
        self._given = ""
        if not self.is_cut_off:  # which its end does not mend
            self._publishes()
        self._host.become(TrainerState.ABSENT)
        for future in self._exports.values():
            if not future.done():
                future.set_exception(ConnectionError(f"the trainer of {self._host.name!r} went away"))
        self._exports.clear()
        if not expected:
            self._emit("trainer_lost", version=self._host.version)

    # --- catching up --------------------------------------------------------------------------

    def ready(self, message: TrainerReady) -> None:
        """Where a (new or returned) trainer stands; bring it to where control stands, or the other way round."""
        if self._rollback is not None:
            self._waiting = message
            return
        self._publishes()
        host, step, lineage = self._host, message.step, message.manifest.lineage
        self._emit("trainer_ready", step=step, version=host.version)
        self._tell_of_damage(message)
        if self._has_lost_all(message):
            return
        if self._proposal is not None and lineage == self._proposal.lineage:
            self._begin_lineage(message, self._proposal.reason)
        elif lineage > host.ancestry.current:
            self._begin_lineage(message, "the trainer had begun it when control died")
        elif not host.ancestry.contains(lineage, step):
            self._propose(f"the trainer holds step {step} of lineage {lineage}, which was abandoned")
        elif step > host.version:
            self._await_unheard(step)
        elif step == host.version:
            self._stands_with_us(message.manifest)
        else:
            self._replay(message)

    def _tell_of_damage(self, message: TrainerReady) -> None:
        """Its checkpoints are not all what was written: an older one serves, which a replay makes exact."""
        place = f"step {message.step}" if message.step else "the beginning"
        self.warnings = [
            f"a checkpoint of {self._host.name!r} is damaged, its trainer goes on from {place}: {one}"
            for one in message.damaged
        ]
        for one in message.damaged:
            self._emit("checkpoint_corrupt", step=message.step, checkpoint=one)

    def _has_lost_all(self, message: TrainerReady) -> bool:
        """Whether nothing but the beginning is left, and nothing may be replayed: then people decide."""
        host = self._host
        if not message.damaged or message.step or not host.version or host.config.trainer.replay:
            return False
        host.halt(
            f"training of {host.name!r} stopped: no checkpoint of it can be used ({'; '.join(message.damaged)});"
            f" either put an intact one back, or set trainer.replay = true to repeat all {host.version} steps from the"
            " ledger, or start a new run directory"
        )
        return True

    def _await_unheard(self, step: int) -> None:
        """It ended a step of which we did not hear (control or the link died meanwhile): its StepDone follows."""
        pending = self._host.loop.pending
        if pending is None or pending.step != step:
            self._propose(f"the trainer holds step {step}, but the ledger has no batch of it")
            return
        self._host.become(TrainerState.TRAINING)

    def _replay(self, message: TrainerReady) -> None:
        """Send the logged batches from the trainer's step to ours."""
        host, step = self._host, message.step
        batches = [b for b in host.context.ledger.batches_after(host.name, step) if b.step <= host.version]
        if not host.config.trainer.replay:
            self._propose("replay is off")
        elif [batch.step for batch in batches] != list(range(step + 1, host.version + 1)):
            self._propose(f"the ledger misses batches between steps {step} and {host.version}")
        else:
            host.versions.release_unknown(message.manifest)
            host.become(TrainerState.REPLAYING)
            published = (host.version, self._last_known_step(batches))
            for batch in batches:
                self.send(TrainStep(batch=batch, replay=True, publish=batch.step in published))

    def _last_known_step(self, batches: Sequence[TrainingBatch]) -> int:
        """Our own, or where its weights were never published the last one before it that a replay can be held to."""
        host = self._host
        if host.known_checksum:
            return host.version
        known = (b.step for b in batches if host.context.ledger.weights_checksum(host.name, b.step))
        return max(known, default=host.version)

    def step_done(self, message: StepDone) -> None:
        """A step was taken, or repeated: only the pending one counts.  A trainer says its last one again."""
        pending = self._host.loop.pending
        if self._proposal is None and pending is not None and message.batch_id == pending.batch_id:
            self._host.count_step(message)

    def published(self, message: Published) -> None:
        """The weights of a step are there.

        What comes before the trainer says where it stands may be of a replay for another control, and is said again.
        """
        host, manifest = self._host, message.manifest
        self._publishes()
        host.publish_metrics = _publish_metrics(message)
        if self._proposal is not None or self._rollback is not None:
            return
        match host.state:
            case TrainerState.REPLAYING if message.step == host.version:
                self._stands_with_us(manifest)
            case TrainerState.REPLAYING:
                self._passes(manifest)
            case TrainerState.READY | TrainerState.TRAINING if self._counts(manifest):
                host.published(manifest)
            case _:
                pass

    def _counts(self, manifest: Manifest) -> bool:
        """Whether it is of a step that counts, and not other weights than are known of it."""
        host, step = self._host, manifest.version
        known = host.known_checksum if step == host.version else ""
        return (
            step <= host.version and host.ancestry.contains(manifest.lineage, step) and known in ("", manifest.checksum)
        )

    def _stands_with_us(self, manifest: Manifest) -> None:
        """The trainer is at our step: its weights must be the bytes that are served."""
        host = self._host
        exact = host.known_checksum in ("", manifest.checksum)
        if host.state is TrainerState.REPLAYING or not exact:
            self._emit("replayed", step=host.version, exact=exact)
        if exact:
            host.published(manifest)
            host.versions.sweep()
            host.become(TrainerState.READY)
        else:
            self._propose(f"its replay to step {host.version} gave other weights (inexact)")

    def _passes(self, manifest: Manifest) -> None:
        """A replay is at an earlier step, whose weights were served: they must be the same bytes, too."""
        host, step = self._host, manifest.version
        known = host.context.ledger.weights_checksum(host.name, step)
        host.versions.release_unknown(manifest)
        if known not in ("", manifest.checksum):
            self._emit("replayed", step=step, exact=False)
            self._propose(f"its replay of step {step} gave other weights (inexact)")

    # --- lineages -----------------------------------------------------------------------------

    def _propose(self, reason: str) -> None:
        """Have the trainer begin a lineage from what it holds."""
        self._proposal = Proposal(self._host.ancestry.current + 1, reason)
        self._host.become(TrainerState.ROLLING_BACK)
        self.send(BeginLineage(policy=self._host.name, lineage=self._proposal.lineage))

    def _begin_lineage(self, message: TrainerReady, reason: str) -> None:
        """The trainer has begun it: control goes back to where it stands."""
        self._proposal = None
        self._host.become(TrainerState.ROLLING_BACK)
        write = self._host.roll_back(base_lineage=message.base_lineage, base_step=message.step, reason=reason)
        self._rollback = asyncio.create_task(
            self._finish_rollback(write, message.manifest, trainer=self._send), name=f"rollback-{self._host.name}"
        )

    async def _finish_rollback(self, write: Future[Lineage], manifest: Manifest, *, trainer: Send | None) -> None:
        """Once the ledger has it: the lost samples wait again, the engines are told, and training goes on."""
        await asyncio.wait([asyncio.wrap_future(write)])
        if write.exception() is not None:
            return  # a failed write ends control
        self._rollback = None
        self._host.refill(manifest)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.ready(waiting)
        elif self._send is trainer and trainer is not None:
            self._host.versions.sweep()
            self._host.become(TrainerState.READY)

    # --- other commands -----------------------------------------------------------------------

    def failed(self, message: Failed) -> None:
        """A command failed at the trainer: a failed step ends training, with its reason in the status."""
        self._emit("trainer_failed", command=message.command, error=message.error)
        match message.command:
            case "train_step" if self._proposal is None and self._host.state is not TrainerState.ABSENT:
                # (before it says where it stands, it speaks of an earlier connection: it fails again if it must)
                if self._host.state is TrainerState.REPLAYING:
                    self._propose(f"its replay failed: {message.error}")
                else:
                    self._host.halt(f"training of {self._host.name!r} stopped: {message.error}")
            case "begin_lineage":
                self._host.halt(f"training of {self._host.name!r} stopped: no new lineage: {message.error}")
            case "publish_weights":
                self._cannot_publish(message)
            case "save_checkpoint":
                self._cannot_save(message)
            case "export":
                for future in self._exports.values():
                    if not future.done():
                        future.set_exception(RuntimeError(f"export failed: {message.error}"))
                self._exports.clear()
            case _:
                pass
        self._host.context.changed.notify()

    def _cannot_publish(self, message: Failed) -> None:
        """Until the weights are there nothing newer is served; where they never will be, training is pointless."""
        host = self._host
        host.context.alarm(host, PUBLISH, f"its trainer cannot publish its weights: {message.error}")
        if not message.final:
            self.problem = f"the trainer of {host.name!r} cannot publish its weights: {message.error}"
        else:
            self.is_cut_off, self.problem = True, ""
            host.halt(f"training of {host.name!r} stopped, as no engine would get its weights: {message.error}")

    def _publishes(self) -> None:
        """What kept it from publishing is over, or of a trainer that is gone."""
        if self.problem or self.is_cut_off:
            self._host.context.alarm(self._host, PUBLISH, "")
        self.problem, self.is_cut_off = "", False

    def _cannot_save(self, message: Failed) -> None:
        """Training goes on; but what a crash costs grows with every step."""
        host = self._host
        self._unsaved += 1
        host.context.alarm(
            host,
            CHECKPOINT,
            f"no checkpoint could be written, {self._unsaved} in a row: {message.error}. Training goes on; a restart"
            " repeats all steps since the last one that was",
        )

    def checkpoint_saved(self, message: CheckpointSaved) -> None:
        context = self._host.context
        if self._unsaved:
            self._unsaved = 0
            context.alarm(self._host, CHECKPOINT, "")
        context.watch(
            context.ledger.record_checkpoint(
                self._host.name, step=message.step, path=message.path, lineage=message.lineage
            )
        )
        self.warnings = []
        self._emit("checkpoint", step=message.step, path=message.path)

    def exported(self, message: Exported) -> None:
        future = self._exports.pop(message.path, None)
        if future is not None and not future.done():
            future.set_result(message)

    async def export(self, path: Path) -> Exported:
        """Have the trainer write a Hugging Face folder.  Raises RuntimeError where it cannot."""
        if self._send is None:
            raise RuntimeError(f"policy {self._host.name!r} has no trainer now; nothing can be exported")
        future = self._exports[str(path)] = asyncio.get_running_loop().create_future()
        self._send(Export(policy=self._host.name, path=str(path)))
        return await future

    def _emit(self, event: str, **fields: object) -> None:
        self._host.context.events.emit(event, policy=self._host.name, **fields)


def _publish_metrics(message: Published) -> dict[str, float]:
    files = message.manifest.files
    delta = files[-1].size_bytes if len(files) > 1 else 0
    return {
        "time/publish_s": message.seconds,
        "weights/full_bytes": float(message.manifest.size_bytes),
        "weights/delta_bytes": float(delta),
    }
