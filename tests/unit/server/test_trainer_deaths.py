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

from wingbeat.core.weight_protocol import (
    KeepVersions,
    Manifest,
    Published,
    ReleaseVersion,
    UpdateWeights,
    WeightsServed,
)
from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    ControlMessage,
    Failed,
    SaveCheckpoint,
    StepDone,
    TrainerReady,
    TrainStep,
)
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.policies.host import TrainerState
from wingbeat.server.workers.engines import EnginePool

STEPS = 14
DEATHS = 40
"""Then the trainer lives: it must get to the end."""
BEGINNING = (0, 0, ())


@dataclass
class Disk:
    """What outlives a trainer: (lineage, step, history of its weights), oldest first."""

    checkpoints: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=lambda: [BEGINNING])
    published: set[str] = field(default_factory=set)
    """Paths of the weights in shared memory."""


class Connected:
    """In an inbox: a control took the trainer on."""


class Process:
    """A trainer whose weights are the names of the batches that made them."""

    def __init__(self, course: Any, disk: Disk, rng: random.Random, *, faults: frozenset[str]) -> None:
        self._make, self._disk, self._rng, self._faults = course.make, disk, rng, faults
        if "damaged" in faults and len(disk.checkpoints) > 1 and rng.random() < 0.3:
            disk.checkpoints.pop()
        self._lineage, self._step, self._history = disk.checkpoints[-1]
        self._base_lineage, self._has_failed = self._lineage, False
        self._manifest: Manifest | None = None
        self._staged: Manifest | None = None
        """On its way: published some time later, or never."""
        self._inbox: list[ControlMessage | Connected] = []
        self._last_done: StepDone | None = None
        self._last_published: Published | None = None
        self.alive = True
        self.dial(course.host)

    def dial(self, host: Any) -> None:
        """Connect to control: a new one is told again what its predecessor may not have heard.

        That comes after what is left to do of the predecessor's commands, of which the new control hears.
        """
        self._inbox.append(Connected())
        self._host = host
        host.trainer.joined(self._receive)

    def _receive(self, message: ControlMessage) -> None:
        self._inbox.append(message)

    def lose_control(self) -> None:
        """Some of what control had sent is done, and nobody hears of it."""
        self._host = MagicMock()
        for _ in range(self._rng.randint(0, len(self._inbox))):
            self.work()

    def _publish(self) -> None:
        """Begin to; what was on its way before comes first."""
        self.settle()
        checksum = hashlib.sha256("/".join(self._history).encode()).hexdigest()
        self._staged = msgspec.structs.replace(self._make(self._step, checksum=checksum), lineage=self._lineage)

    def settle(self) -> None:
        """What is on its way is there."""
        if self._staged is not None:
            self._manifest, self._staged = self._staged, None
            self._disk.published.add(self._manifest.path)
            self._last_published = Published("solver", self._manifest.version, self._manifest)
            self._host.trainer.published(self._last_published)

    def _published(self) -> Manifest:
        """What it stands at, published now where it is not."""
        self.settle()
        if self._manifest is None or self._manifest.version != self._step:
            if self._has_failed:
                self._reload()
            self._publish()
            self.settle()
        assert self._manifest is not None
        return self._manifest

    def _reload(self) -> None:
        self._lineage, self._step, self._history = self._disk.checkpoints[-1]
        self._base_lineage, self._has_failed, self._manifest = self._lineage, False, None
        self._last_done = self._last_published = None

    def _tell(self) -> None:
        manifest = self._published()
        self._host.trainer.ready(TrainerReady("solver", self._step, manifest, self._base_lineage))

    def die(self) -> None:
        self.alive = False
        self._host.trainer.left()

    def work(self) -> None:
        """Handle one message, or publish what is on its way."""
        if self._rng.random() < 0.4:
            return self.settle()
        room = [message for message in self._inbox if isinstance(message, ReleaseVersion | KeepVersions)]
        self._inbox = [message for message in self._inbox if message not in room]
        room += [self._inbox.pop(0)] if self._inbox else []
        for message in room:
            self._handle(message)

    def catch_up(self) -> None:
        while self._inbox:
            self.work()
        self.settle()

    def _handle(self, message: Any) -> None:
        match message:
            case Connected():
                self._tell()
                if self._last_done is not None:
                    self._host.trainer.step_done(self._last_done)
                if self._last_published is not None:
                    self._host.trainer.published(self._last_published)
            case TrainStep(batch=batch, replay=replay, publish=publish):
                broken = replay and "fails" in self._faults and self._rng.random() < 0.2
                if self._has_failed or broken or batch.step != self._step + 1:
                    self._has_failed = True
                    self._host.trainer.failed(Failed("solver", "train_step", "out of memory"))
                    return
                other = replay and "inexact" in self._faults and self._rng.random() < 0.2
                self._history = (*self._history, batch.batch_id, *(["~"] if other else []))
                self._step, self._lineage, self._base_lineage = batch.step, batch.lineage, batch.lineage
                self._last_done = StepDone("solver", batch.batch_id, batch.step, {}, {}, 0.0, 1.0)
                self._last_published = None
                self._host.trainer.step_done(self._last_done)
                if publish:
                    self._publish()
            case SaveCheckpoint() if not self._has_failed:
                kept = [c for c in self._disk.checkpoints if c[1] < self._step]
                self._disk.checkpoints = [*kept, (self._lineage, self._step, self._history)]
                self._host.trainer.checkpoint_saved(CheckpointSaved("solver", self._step, "c", self._lineage))
            case BeginLineage(lineage=lineage):
                if self._has_failed:
                    self.settle()
                    self._reload()
                manifest = self._published()
                self._base_lineage, self._lineage = self._lineage, lineage
                self._manifest = msgspec.structs.replace(manifest, lineage=lineage)
                self._last_done = self._last_published = None
                self._tell()
            case ReleaseVersion(version=version, checksum=checksum):
                held = self._manifest if self._manifest is not None and self._manifest.version == self._step else None
                self._disk.published -= {self._make(version, checksum=checksum).path} - {held.path if held else ""}
            case KeepVersions(checksums=checksums):
                kept = {*checksums, *(() if self._manifest is None else (self._manifest.checksum,))}
                self._disk.published = {path for path in self._disk.published if path.rpartition("-")[2] in kept}
            case _:
                pass


class Engine:
    """Loads what it is told to, in its own time."""

    def __init__(self, pool: EnginePool, disk: Disk) -> None:
        self._pool, self._disk = pool, disk
        self._inbox: list[Any] = []
        self._link = EngineLink("engine-0", "host", self._inbox.append)
        pool.join(self._link)

    def die(self) -> None:
        self._pool.leave(self._link)

    def work(self) -> None:
        """Handle one message."""
        message = self._inbox.pop(0) if self._inbox else None
        if isinstance(message, UpdateWeights):
            told = message.manifest
            assert told.path in self._disk.published, f"{told.path} is gone"
            self._pool.served(self._link, WeightsServed("solver", told.version, told.checksum, lineage=told.lineage))

    def catch_up(self) -> None:
        while self._inbox:
            self.work()


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
        host = self._course.successor()
        self._run = asyncio.create_task(host.run(self._course.after_step))


async def live(course: Any, rng: random.Random, faults: frozenset[str]) -> None:
    """Feed groups and kill trainers and control until the run is complete."""
    control, disk, number, deaths, process = Control(course), Disk(), 0, 0, None
    engine, host = Engine(course.host.context.engines, disk), course.host
    for _ in range(20_000):
        host = course.host
        await asyncio.sleep(0 if rng.random() < 0.9 else 0.002)
        if process is None or not process.alive:
            process = Process(course, disk, rng, faults=faults)
        if not host.complete and host.admits_group():
            course.group(f"g{number}", floor=host.lowest_version())
            number += 1
        process.work()
        if rng.random() < 0.5:
            engine.work()
            host.release_unused()  # as with every acknowledgement
        if host.complete and host.state is TrainerState.READY and host.loop.pending is None:
            process.settle()
            engine.catch_up()
            host.release_unused()
            process.catch_up()
            assert host.manifest.path in disk.published and len(disk.published) <= 2, "files of other versions are left"
            return await control.end()
        control.check()
        if deaths < DEATHS and rng.random() < 0.02:
            deaths += 1
            process.die()
        if deaths < DEATHS and rng.random() < 0.01:
            deaths += 1
            engine.die()
            engine = Engine(course.host.context.engines, disk)
        if deaths < DEATHS and rng.random() < 0.01:
            deaths += 1
            process.lose_control()
            await control.restart()
            engine = Engine(course.host.context.engines, disk)
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
        assert course.host.known_checksum == held == course.host.manifest.checksum
    assert [lineage.lineage for lineage in ledger.lineages()] == list(range(1, course.host.ancestry.current + 1))
