"""The step loop of one policy: from buffered groups to a trained version.

    waits for                                                    unblocked by
    a trainer that stands where control stands                   TrainerReady, the end of a replay or rollback
    enough groups, staleness and barrier permitting, and disk    a group closing, an older one ending, another step
    the step's end                                               StepDone (also after the trainer's or our own death)

Every step's batch is in the ledger before the trainer sees it.  A batch that is logged stays *pending* until its
step counts, whichever trainer takes it, or until a rollback abandons it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wingbeat.core.samples import TrainingBatch
from wingbeat.core.worker_protocol import SaveCheckpoint, StepDone
from wingbeat.dataflow.buffer import BatchDraft
from wingbeat.server.policies.trainer_state import TrainerState

if TYPE_CHECKING:
    from wingbeat.server.policies.host import PolicyHost

TICK_S = 1.0
"""How often a held-back batch looks at the clock, or at the disk."""


class StepEnd(StrEnum):
    """How a pending batch ends without a new version."""

    FAILED = "failed"
    ABANDONED = "abandoned"


class Counted(NamedTuple):
    """A step whose version counts."""

    done: StepDone
    write: Future[bool]
    """Its record in the ledger."""


class StepListener(Protocol):
    """Told after every finished step, before the next begins (evaluation, progress)."""

    async def __call__(self, host: PolicyHost, metrics: dict[str, float]) -> None: ...


class StepLoop:
    """Runs on control's event loop."""

    def __init__(self, host: PolicyHost) -> None:
        self._host = host
        self.pending: TrainingBatch | None = None
        """Logged, and its step does not count yet."""
        self.in_step = False
        """From the moment a batch left the buffer until its version counts."""
        self._end: asyncio.Future[Counted | StepEnd] | None = None
        self._held_since: float | None = None

    async def run(self, after_step: StepListener) -> None:
        """Train until the run is complete, or a step fails."""
        host = self._host
        for batch in host.context.ledger.batches_after(host.name, host.version):
            if batch.lineage == host.ancestry.current:  # logged before a restart
                self._expect(batch)
        while self.pending is not None or not host.complete:
            if self.pending is None and not await self._prepare():
                return
            end = await self._until_end()
            if end is StepEnd.FAILED:
                return
            if isinstance(end, Counted):
                await self._settle(end, after_step)

    def count(self, done: StepDone, write: Future[bool]) -> None:
        """The pending step is done: its version counts from now on, and the ledger is told."""
        self.pending, self.in_step = None, False
        if self._end is not None and not self._end.done():
            self._end.set_result(Counted(done, write))

    def give_up(self, end: StepEnd) -> None:
        """The pending step will not be done."""
        self.pending, self.in_step = None, False
        if self._end is not None and not self._end.done():
            self._end.set_result(end)

    async def _prepare(self) -> bool:
        """Log the next batch; False once training has ended.  A rollback may take it back at once."""
        draft = await self._next_draft()
        if draft is None:
            return False
        host = self._host
        step, lineage = host.version + 1, host.ancestry.current
        batch = TrainingBatch(
            batch_id=f"{host.name}-{step}" if not lineage else f"{host.name}-{lineage}.{step}",
            policy=host.name,
            step=step,
            episodes=draft.episodes,
            seed=(host.context.seed * 1_000_003 + step) % 2**31,
            lineage=lineage,
            replayed=draft.replayed,
        )
        await asyncio.wrap_future(
            host.context.ledger.log_batch(batch, group_ids=draft.group_ids, dropped=draft.dropped)
        )
        if lineage == host.ancestry.current and not host.halted:
            self._expect(batch)
        return not host.halted

    def _expect(self, batch: TrainingBatch) -> None:
        self.pending, self.in_step = batch, True
        self._end = asyncio.get_running_loop().create_future()
        self._host.offer()

    async def _next_draft(self) -> BatchDraft | None:
        host = self._host
        while not host.complete:
            if host.state is TrainerState.READY and not host.context.ledger.blocked and self._may_step():
                draft = host.buffer.take(host.version)
                self._record_drops(draft)
                if draft is not None:
                    self._held_since = None
                    self.in_step = True
                    return draft
            elif not host.trainer.is_rolling_back:
                self._record_drops(None)
            is_timed = self._held_since is not None or bool(host.context.ledger.blocked)
            await host.context.changed.wait(TICK_S if is_timed else None)
        return None

    def _record_drops(self, draft: BatchDraft | None) -> None:
        """Members that left the buffer although no batch carries them."""
        dropped = self._host.buffer.drain_dropped() if draft is None else ()
        if dropped:
            context = self._host.context
            context.watch(context.ledger.mark_dropped(self._host.name, dropped=dropped))

    def _may_step(self) -> bool:
        """The barrier and the staleness rule; a straggler is waited for as long as the rule says."""
        host = self._host
        in_flight, buffered = host.running_floors(), host.buffer.floors()
        if not host.context.may_pass(host.name, host.version) or not host.rule.waits(
            host.version, in_flight=in_flight, buffered=buffered
        ):
            self._held_since = None
        elif self._held_since is None:
            self._held_since = host.context.clock()
        waited_s = 0.0 if self._held_since is None else host.context.clock() - self._held_since
        return host.context.may_pass(host.name, host.version) and host.rule.may_step(
            host.version, in_flight=in_flight, buffered=buffered, waited_s=waited_s
        )

    async def _until_end(self) -> Counted | StepEnd:
        """Without a trainer at hand, its successor is given the batch."""
        if self._end is None:
            return StepEnd.ABANDONED
        overlap = self._host.context.overlap
        overlap.training(+1)
        try:
            return await self._end
        finally:
            overlap.training(-1)
            self._end = None

    async def _settle(self, counted: Counted, after_step: StepListener) -> None:
        """Once the ledger has the step: a checkpoint where one is due, then whoever listens."""
        await asyncio.wrap_future(counted.write)
        host, step = self._host, counted.done.step
        if step % host.config.trainer.checkpoint_every == 0 or step == host.context.total_steps:
            host.send(SaveCheckpoint(policy=host.name, step=step))
        host.context.changed.notify()
        await after_step(host, counted.done.metrics)
