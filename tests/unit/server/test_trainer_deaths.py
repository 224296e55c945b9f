"""Trainers and controls that die at any moment: the ledger's surviving steps are what the weights hold."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    ControlMessage,
    Failed,
    Manifest,
    SaveCheckpoint,
    StepDone,
    TrainerReady,
    TrainStep,
)
from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.server.policies import PolicyHost, TrainerState

STEPS = 14
DEATHS = 40
"""Then the trainer lives: it must get to the end."""
BEGINNING = (0, 0, ())


@dataclass
class Disk:
    """What outlives a trainer: (lineage, step, history of its weights), oldest first."""

    checkpoints: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=lambda: [BEGINNING])


class Process:
    """A trainer whose weights are the names of the batches that made them."""

    def __init__(self, course: Any, disk: Disk, rng: random.Random, *, faults: frozenset[str]) -> None:
        self._make, self._disk, self._rng, self._faults = course.make, disk, rng, faults
        if "damaged" in faults and len(disk.checkpoints) > 1 and rng.random() < 0.3:
            disk.checkpoints.pop()
        self._lineage, self._step, self._history = disk.checkpoints[-1]
        self._base_lineage, self._has_failed = self._lineage, False
        self._inbox: list[ControlMessage] = []
        self._last_done: StepDone | None = None
        self.alive = True
        self.dial(course.host)

    def dial(self, host: Any) -> None:
        """Connect to control: a new one is told again what its predecessor may not have heard."""
        self._host = host
        host.trainer.joined(self._inbox.append)
        self._tell()
        if self._last_done is not None:
            host.trainer.step_done(self._last_done)

    def lose_control(self) -> None:
        """What control had sent is done all the same, and nobody hears of it."""
        self._host = MagicMock()
        while self._inbox:
            self.work()

    def _manifest(self) -> Manifest:
        checksum = hashlib.sha256("/".join(self._history).encode()).hexdigest()
        return msgspec.structs.replace(self._make(self._step, checksum=checksum), lineage=self._lineage)

    def _tell(self) -> None:
        self._host.trainer.ready(TrainerReady("solver", self._step, self._manifest(), self._base_lineage))

    def die(self) -> None:
        self.alive = False
        self._host.trainer.left()

    def work(self) -> None:
        """Handle one message."""
        if not self._inbox:
            return
        match self._inbox.pop(0):
            case TrainStep(batch=batch, replay=replay):
                broken = replay and "fails" in self._faults and self._rng.random() < 0.2
                if self._has_failed or broken or batch.step != self._step + 1:
                    self._has_failed = True
                    self._host.trainer.failed(Failed("solver", "train_step", "out of memory"))
                    return
                other = replay and "inexact" in self._faults and self._rng.random() < 0.2
                self._history = (*self._history, batch.batch_id, *(["~"] if other else []))
                self._step, self._lineage, self._base_lineage = batch.step, batch.lineage, batch.lineage
                done = StepDone("solver", batch.batch_id, batch.step, self._manifest(), {}, {}, 0.0, 1.0)
                self._last_done = done
                self._host.trainer.step_done(done)
            case SaveCheckpoint() if not self._has_failed:
                kept = [c for c in self._disk.checkpoints if c[1] < self._step]
                self._disk.checkpoints = [*kept, (self._lineage, self._step, self._history)]
                self._host.trainer.checkpoint_saved(CheckpointSaved("solver", self._step, "c", self._lineage))
            case BeginLineage(lineage=lineage):
                if self._has_failed:
                    self._lineage, self._step, self._history = self._disk.checkpoints[-1]
                    self._has_failed = False
                self._base_lineage, self._lineage, self._last_done = self._lineage, lineage, None
                self._tell()
            case _:
                pass


class Control:
    """The policy's part of control, which dies and reads its ledger again, too."""

    def __init__(self, course: Any) -> None:
        self._course = course
        self._run = asyncio.create_task(course.host.run(course.after_step))

    def check(self) -> None:
        """Raises what ended the step loop, if something did."""
        if self._run.done():
            self._run.result()

    async def end(self) -> None:
        tasks = [task for task in (self._run, self._course.host.trainer._rollback) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._course.desk.check_writes()

    async def restart(self) -> None:
        await self.end()
        self._course.desk.ledger.save_dealer_state({}).result(10)  # what was written before is on disk, too
        old, desk = self._course.host, self._course.desk
        rule, name = old.rule, old.name
        limits = {"groups_per_step": rule.gate.groups_per_step, "max_staleness": rule.gate.max_staleness}
        host = PolicyHost(
            old.spec,
            template=old.template,
            buffer=PolicyBuffer(name, **limits),
            rule=rule,
            context=old.context,
            running_floors=desk.book.floors,
        )
        host.restore(version=desk.ledger.summary().trained_step.get(name, 0))
        self._course.host = desk.policies[name] = host
        self._run = asyncio.create_task(host.run(self._course.after_step))


async def live(course: Any, rng: random.Random, faults: frozenset[str]) -> None:
    """Feed groups and kill trainers and control until the run is complete."""
    control, disk, number, deaths, process = Control(course), Disk(), 0, 0, None
    for _ in range(20_000):
        host = course.host
        await asyncio.sleep(0 if rng.random() < 0.9 else 0.002)
        if process is None or not process.alive:
            process = Process(course, disk, rng, faults=faults)
        if not host.complete and host.admits_group():
            course.group(f"g{number}", floor=host.lowest_version())
            number += 1
        process.work()
        if host.complete and host.state is TrainerState.READY and host.loop.pending is None:
            return await control.end()
        control.check()
        if deaths < DEATHS and rng.random() < 0.02:
            deaths += 1
            process.die()
        if deaths < DEATHS and rng.random() < 0.01:
            deaths += 1
            process.lose_control()
            await control.restart()
            if process.alive:
                process.dial(course.host)
    raise AssertionError(f"not complete: version {host.version}, {host.state}, halted {host.halted!r}")


@pytest.mark.slow
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("seed", range(8))
async def test_the_surviving_steps_are_what_the_weights_hold(
    open_course: Callable[..., Any], seed: int, replay: bool
) -> None:
    rng = random.Random(seed)
    kinds = ("fails", "damaged", "inexact")
    faults = frozenset(kind for kind in kinds if rng.random() < 0.6)
    trainer = {"replay": replay, "checkpoint_every": rng.randint(1, 4)}
    course = open_course(policies={"solver": {"trainer": trainer}}, steps=STEPS, max_staleness=rng.randint(0, 3))
    await live(course, rng, faults)
    ledger = course.desk.ledger
    assert ledger.verify() == [] and not course.host.halted
    batches = ledger.batches_after("solver", 0)
    assert [batch.step for batch in batches] == list(range(1, STEPS + 1))
    trained = Counter((e.episode_id, e.attempt) for batch in batches for e in batch.episodes)
    assert set(trained.values()) == {1}
    for batch in batches:
        ancestry = course.host.ancestry
        assert ancestry.contains(batch.lineage, batch.step)
        for episode in batch.episodes:
            assert batch.step - 1 - episode.min_version <= course.host.rule.gate.max_staleness
    if "inexact" not in faults:
        held = hashlib.sha256("/".join(batch.batch_id for batch in batches).encode()).hexdigest()
        assert course.host.live_checksum == held
    assert [lineage.lineage for lineage in ledger.lineages()] == list(range(1, course.host.ancestry.current + 1))
