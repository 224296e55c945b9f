"""One policy as control sees it: its clock (lineage and version), its buffer, its trainer and what is served.

``step_loop`` trains it, ``trainer_link`` speaks with its trainer, ``versions`` keeps its files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from wingbeat.core.config import PolicyConfig
from wingbeat.core.events import EventLog
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.signals import Changed
from wingbeat.core.weight_protocol import Manifest
from wingbeat.core.worker_protocol import ControlMessage, Exported, PolicySpec, StepDone
from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.lineages import Ancestry, Lineage
from wingbeat.dataflow.operators import OperatorChain, VarianceRule, has_zero_variance
from wingbeat.dataflow.records import ReadyGroup
from wingbeat.dataflow.step_rule import StepRule
from wingbeat.server.overlap import OverlapMeter
from wingbeat.server.policies.step_loop import StepEnd, StepListener, StepLoop
from wingbeat.server.policies.trainer_link import TrainerLink
from wingbeat.server.policies.trainer_state import TrainerState
from wingbeat.server.policies.versions import PolicyVersions
from wingbeat.server.workers.engines import EnginePool
from wingbeat.tracking.template import ChatTemplate

logger = logging.getLogger(__name__)

__all__ = ["HostContext", "PolicyHost", "StepListener", "TrainerState", "base_manifest"]


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
    encodes_deltas: bool = False
    """Whether a trainer is asked for deltas once engines of other hosts are connected."""
    may_pass: Callable[[str, int], bool] = lambda policy, version: True
    """Whether the barrier lets a policy at this version take its next step."""
    starves: Callable[[str, int], bool] = lambda policy, version: False
    """Whether a policy that one at this version waits for needs more groups than there are."""
    alarm: Callable[[PolicyHost, str, str], None] = lambda host, name, text: None
    """An alarm that no step's metrics show sounds for the reason given; "" ends it."""
    rebase: Callable[[str, int], None] = lambda policy, highest: None
    """After a rollback: versions of the policy above ``highest`` that running episodes and open groups hold count as
    ``highest`` from now on."""


class PolicyHost:
    """Owns one policy; all methods run on control's event loop."""

    def __init__(
        self,
        spec: PolicySpec,
        *,
        template: ChatTemplate,
        buffer: PolicyBuffer,
        rule: StepRule,
        context: HostContext,
        running_floors: Callable[[str], list[int]],
        chain: OperatorChain | None = None,
    ) -> None:
        """``running_floors`` gives the floor versions of a policy's open training groups."""
        self.spec = spec
        self.config = PolicyConfig.model_validate(spec.config)
        self.template = template
        self.buffer = buffer
        self.rule = rule
        self.context = context
        self.chain = chain if chain is not None else OperatorChain(spec.name)
        self.version = 0
        self.ancestry = Ancestry()
        self.state = TrainerState.ABSENT if self.config.trainable else TrainerState.FROZEN
        self.halted = ""
        """Why training stopped for good, if it did."""
        self.trained_tokens = 0
        self.equal_groups = 0
        """Groups in a row from which nothing can be learnt, as their rewards were all equal."""
        self.staleness_max = 0
        self.last_batch: TrainingBatch | None = None
        """Of the last step that counted in this process."""
        self.trainer = TrainerLink(self)
        self.versions = PolicyVersions(spec.name, context.engines, send=self.trainer.send)
        self.loop = StepLoop(self)
        self._running_floors = running_floors
        self.publish_metrics: dict[str, float] = {}
        """Of the newest weights whose publishing this process heard of."""
        self.known_checksum = ""
        """Of the weights of :attr:`version`, also as an earlier control knew it; "" until they are published."""
        if not self.config.trainable:
            self.adopt(base_manifest(spec, self.version))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def manifest(self) -> Manifest | None:
        """What is served live."""
        return self.versions.live

    @property
    def newest(self) -> int:
        """The newest version whose weights are published; :attr:`version` where there are none yet.

        It is behind :attr:`version` while the weights of the last step are being published.
        """
        live = self.versions.live
        return self.version if live is None else min(self.version, live.version)

    @property
    def has_trainer(self) -> bool:
        return self.trainer.is_connected

    @property
    def trainer_id(self) -> str:
        """The worker that last connected as this policy's trainer."""
        return self.trainer.worker_id

    @property
    def in_step(self) -> bool:
        """From the moment a batch left the buffer until its version counts."""
        return self.loop.in_step

    @property
    def complete(self) -> bool:
        """It trains no more: frozen, at its last step, or halted."""
        return not self.config.trainable or self.version >= self.context.total_steps or bool(self.halted)

    # --- training -----------------------------------------------------------------------------

    async def run(self, after_step: StepListener) -> None:
        """Train until the run is complete, and again where a rollback lost its last steps; ends where one fails."""
        while not self.halted:
            await self.loop.run(after_step)
            while self.complete and not self.halted:
                await self.context.changed.wait()

    def send(self, message: ControlMessage) -> None:
        """To the trainer, if there is one now."""
        self.trainer.send(message)

    def become(self, state: TrainerState) -> None:
        """The trainer's state changed; one that is ready is given the pending step."""
        if self.state is TrainerState.FROZEN:
            return
        self.state = state
        self.offer()
        self.context.changed.notify()

    def offer(self) -> None:
        """Give the pending step to a trainer that is ready for it."""
        if self.state is TrainerState.READY and self.loop.pending is not None and not self.halted:
            self.state = TrainerState.TRAINING
            self.trainer.give(self.loop.pending)

    def count_step(self, done: StepDone) -> None:
        """The pending step is done: version, ledger.  Its weights follow (:meth:`published`)."""
        self.last_batch = self.loop.pending
        self.version, self.known_checksum = done.step, ""
        self.chain.on_version(self.version)
        self.trained_tokens += int(done.metrics.get("trained_tokens", 0))
        self.staleness_max = max(self.staleness_max, int(done.metrics.get("staleness/max", 0)))
        write = self.context.ledger.mark_trained(
            self.name, step=done.step, metrics=done.metrics, advantages=done.advantages
        )
        self.loop.count(done, write)
        self.become(TrainerState.READY if self.has_trainer else TrainerState.ABSENT)

    def halt(self, reason: str) -> None:
        """End training of this policy for good; the first reason stays."""
        if self.halted:
            return
        self.halted = reason
        self.loop.give_up(StepEnd.FAILED)
        self.context.changed.notify()

    def add_group(self, group: ReadyGroup) -> bool:
        """A group of this policy closed.  Whether it waits to be trained now."""
        trainer = self.config.trainer
        teaches = trainer.learns_from_equal_rewards or not has_zero_variance(
            group, VarianceRule(trainer.credit, trainer.gamma)
        )
        self.equal_groups = 0 if teaches else self.equal_groups + 1
        return self.buffer.add(group)

    @property
    def lacks_groups(self) -> bool:
        """It is called, and yet all groups of it that run or wait make no batch for its next step."""
        if self.in_step or not (self.buffer.was_called or self.version):
            return False
        return len(self.running_floors()) + len(self.buffer) < self.rule.gate.groups_per_step

    def running_floors(self) -> list[int]:
        """Floor versions of the training groups that have not closed."""
        return self._running_floors(self.name)

    def admits_group(self) -> bool:
        """Whether one more training group may start: recorded, trained in time, and still needed.

        Policies that train no more (frozen, complete) admit whatever the others need, and so do those that the
        barrier holds back for want of another's groups.
        """
        if self.context.ledger.blocked or self.trainer.is_rolling_back:
            return False
        if self.complete or self.context.starves(self.name, self.version):
            return True
        floors = [*self.running_floors(), *self.buffer.floors()]
        next_version = self.version + self.in_step
        if len(floors) >= (self.context.total_steps - next_version) * self.rule.gate.groups_per_step:
            return False
        return self.rule.gate.may_admit(floors, version=next_version, floor=self.lowest_version())

    def lowest_version(self) -> int:
        """The oldest version that any engine may still sample with, as it counts in this lineage."""
        found = [
            self.ancestry.effective(served.version, lineage=min(served.lineage, self.ancestry.current))
            for served in self.context.engines.served_by_all(self.name)
        ]
        return min([self.version, *found])

    # --- lineages -----------------------------------------------------------------------------

    def restore(self, *, version: int) -> None:
        """Go on from the ledger: lineages, version, operators, and what waits to be trained."""
        ledger = self.context.ledger
        self.ancestry, self.version = ledger.ancestry(self.name), version
        self.known_checksum = ledger.weights_checksum(self.name, version)
        self.context.engines.rolled_back(self.name, self.ancestry)
        self.chain.load_state_dict(ledger.load_operator_states().get(self.name, {}))
        self._recall()
        for group in ledger.unconsumed(self.name):
            self.buffer.add(group)

    def roll_back(self, *, base_lineage: int, base_step: int, reason: str) -> Future[Lineage]:
        """Begin the next lineage where the trainer stands; :meth:`refill` once the ledger has it.

        From now on nothing that abandoned versions sampled counts as newer than the last version that survives.
        """
        before, context = self.ancestry, self.context
        base_lineage = min(base_lineage, before.current)  # a ledger of old may not know the trainer's
        self._record_drops()
        self.buffer.clear()  # the ledger has it, and knows what the trainer's step leaves of it
        write = context.ledger.begin_lineage(self.name, base_lineage=base_lineage, base_step=base_step, reason=reason)
        context.watch(write)
        base_lineage, base_step = before.normal(base_lineage, base_step)
        lineage = Lineage(self.name, before.current + 1, base_lineage, base_step, reason)
        lost = max(0, self.version - base_step)
        self.ancestry, self.version = before.with_lineage(lineage), base_step
        self.known_checksum = ""
        context.engines.rolled_back(self.name, self.ancestry)
        context.engines.lower_floors(self.name, highest=self._highest(before))
        context.rebase(self.name, self._highest(before))
        self.loop.give_up(StepEnd.ABANDONED)
        logger.warning("policy %s begins lineage %d at step %d: %s", self.name, lineage.lineage, base_step, reason)
        context.events.emit(
            "lineage_began",
            policy=self.name,
            lineage=lineage.lineage,
            base_lineage=base_lineage,
            base_step=base_step,
            lost_steps=lost,
            reason=reason,
        )
        return write

    def refill(self, manifest: Manifest) -> None:
        """The lineage is on record: lost samples wait again, and engines go to its weights."""
        groups = {group.group_id: group for group in self.buffer.clear()}  # closed meanwhile
        groups |= {group.group_id: group for group in self.context.ledger.unconsumed(self.name)}
        gone = self._record_drops()
        for group in groups.values():
            members = tuple(m for m in group.members if (m.episode_id, m.attempt) not in gone)
            if members:
                self.buffer.add(replace(group, members=members))
        self._recall()
        self.published(manifest)

    def _record_drops(self) -> set[tuple[str, int]]:
        """Have the ledger learn which attempts left the buffer although no batch carries them."""
        dropped = self.buffer.drain_dropped()
        if dropped:
            self.context.watch(self.context.ledger.mark_dropped(self.name, dropped=dropped))
        return {(one.episode_id, one.attempt) for one in dropped}

    def _highest(self, before: Ancestry) -> int:
        """What versions of the lineage before count as at most."""
        ceiling = self.ancestry.ceiling(lineage=before.current)
        return self.version if ceiling is None else ceiling

    def _recall(self) -> None:
        """What operators may replay follows from the surviving batches."""
        first, ledger = self.version - self.rule.gate.max_staleness, self.context.ledger
        batches = ledger.batches_after(self.name, first)
        self.chain.recall(batches, erased=ledger.erased_after(self.name, first))
        self.chain.on_version(self.version)

    # --- versions -----------------------------------------------------------------------------

    def published(self, manifest: Manifest) -> None:
        """The weights of a surviving version are there: on record, and served unless later ones are."""
        if manifest.version == self.version:
            self.known_checksum = manifest.checksum
        if manifest.version:
            self.context.watch(
                self.context.ledger.record_weights(self.name, step=manifest.version, checksum=manifest.checksum)
            )
        self.adopt(manifest)
        self.context.changed.notify()

    async def until_published(self, version: int) -> None:
        """Wait for the weights of a version that just came to be, or until it will not have any."""
        while self.version == version and self.newest != version and not self.halted:
            await self.context.changed.wait()

    def adopt(self, manifest: Manifest) -> None:
        """Serve these weights, which are of a surviving version, from now on."""
        self.versions.adopt(msgspec.structs.replace(manifest, lineage=self.ancestry.current))

    def serve(self, manifest: Manifest) -> None:
        """Serve other weights of a policy without a trainer (snapshots), also older ones of a later lineage."""
        self.version = manifest.version
        self.context.engines.lower_floors(self.name, highest=self.version)
        self.versions.adopt(manifest)
        self.context.changed.notify()

    def manifest_of(self, version: int) -> Manifest | None:
        """The manifest of a surviving version whose file still exists."""
        return self.versions.of(version, self.ancestry)

    def missing(self, version: int) -> str:
        """Why :meth:`manifest_of` gives none, for people; "" where it gives one."""
        if self.manifest_of(version) is not None:
            return ""
        if self.versions.is_taken(version, self.ancestry):
            return (
                f"an evaluation still runs on an abandoned version {version} of policy {self.name!r}, from before a"
                f" rollback; once it is done, version {version} can be evaluated"
            )
        if self.manifest is None:
            return f"policy {self.name!r} has no weights yet: its trainer is starting"
        if self.newest < version <= self.version:
            return f"the weights of version {version} of policy {self.name!r} are still being published"
        return f"version {version} of policy {self.name!r} is no longer held; the live one is {self.version}"

    def release_unused(self) -> None:
        """Delete files of versions that nobody can ask for any more."""
        self.versions.release_unused()

    def pin(self, version: int) -> None:
        """Keep a version (of which :meth:`manifest_of` gives the manifest) served until as many :meth:`unpin`."""
        manifest = self.manifest_of(version)
        if manifest is None:
            raise ValueError(f"policy {self.name!r} holds no version {version}")
        self.versions.pin(manifest)

    def unpin(self, version: int) -> None:
        self.versions.unpin(version)

    def is_pinned(self, version: int) -> bool:
        return self.versions.is_pinned(version)

    async def export(self, path: Path) -> Exported:
        """Have the trainer write a Hugging Face folder.  Raises RuntimeError where it cannot."""
        return await self.trainer.export(path)


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
