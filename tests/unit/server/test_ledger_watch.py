"""Damage on disk, as control meets it: ledgers with their copies, checkpoints that are not what was written."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from wingbeat.core.types import Split
from wingbeat.core.worker_protocol import BeginLineage, TrainerReady
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_backup import restore
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.server.ledger_watch import LedgerWatch
from wingbeat.server.policies.host import TrainerState

Course = Any


@asynccontextmanager
async def training(course: Course) -> AsyncIterator[None]:
    run = asyncio.create_task(course.host.run(course.after_step))
    yield
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    course.desk.check_writes()


async def step(course: Course, trainer: Any, *, lineage: int = 0) -> None:
    """The step that is under way, or comes next, ends."""
    wanted = course.host.version + 1
    await course.until(lambda: trainer.steps and trainer.steps[-1][0] == wanted)
    trainer.done(wanted, lineage=lineage)
    await course.until(lambda: course.finished and course.finished[-1][0] == wanted)


def damaged(course: Course, trainer: Any, at: int) -> None:
    """The trainer says that it had to pass its newest checkpoint over."""
    trainer.connect(course.host)
    course.host.trainer.ready(TrainerReady("solver", at, course.make(at), damaged=("step-3: the checksum differs",)))


async def test_a_trainer_ahead_of_a_restored_ledger_keeps_its_steps_and_nothing_trains_twice(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(max_staleness=8)
    desk, trainer = course.desk, course.trainer()
    async with training(course):
        trainer.join()
        course.group("first")
        await step(course, trainer)
        course.group("second")
        course.group("third")
        await course.until(lambda: len(trainer.steps) == 2)  # on "second"; "third" waits
        desk.ledger.back_up()
        await step(course, trainer)
        await step(course, trainer)  # on "third": of that the copy knows nothing
    path = desk.run_dir / "ledger.sqlite"
    desk.ledger.close()
    restore(path)
    desk.ledger = Ledger.open(path, run=RunMeta("run", seed=0))
    course.host.context = replace(course.host.context, ledger=desk.ledger)
    desk.finishing._parts = replace(desk.finishing._parts, ledger=desk.ledger)
    course.successor()
    course.finished.clear()
    assert course.host.version == 1
    async with training(course):
        again = course.trainer()
        await asyncio.sleep(0)  # it begins
        assert course.host.loop.pending is not None, 'the logged step, on "second"'
        again.join(step=3)
        assert again.of(BeginLineage)[-1].lineage == 1
        again.begin(3)
        await course.until_changed(lambda: course.host.state is TrainerState.READY)
        assert (course.host.version, course.host.ancestry.current) == (3, 1)
        course.group("fourth", floor=3)
        await step(course, again, lineage=1)
    states = {v.group.id: v.samples[0] for v in desk.ledger.attempts(split=Split.TRAIN)}
    assert {name: (s.state, s.step, s.reason) for name, s in states.items()} == {
        "first": (SampleState.TRAINED, 1, None),
        "second": (SampleState.TRAINED, 2, None),
        "third": (SampleState.DROPPED, None, "maybe_trained"),
        "fourth": (SampleState.TRAINED, 4, None),
    }
    assert desk.ledger.verify() == []


async def test_a_control_that_starts_knows_the_weights_of_its_version(open_course: Callable[..., Course]) -> None:
    course = open_course(max_staleness=8)
    trainer = course.trainer()
    async with training(course):
        trainer.join()
        course.group("first")
        await step(course, trainer)
    course.successor()
    same = course.trainer()
    same.join(step=1)
    assert course.host.state is TrainerState.READY
    course.successor()
    other = course.trainer()
    other.connect(course.host)
    manifest = msgspec.structs.replace(course.make(1), checksum="other bytes")
    course.host.trainer.ready(TrainerReady("solver", 1, manifest))
    assert other.of(BeginLineage), "its weights are not those that the run had: they begin a lineage"


async def test_a_damaged_checkpoint_is_told_until_the_next_one(open_course: Callable[..., Course]) -> None:
    course = open_course(max_staleness=8)
    trainer = course.trainer()
    async with training(course):
        trainer.join()
        course.group("first")
        await step(course, trainer)
        course.host.trainer.left()
        second = course.trainer()
        damaged(course, second, at=0)
        assert course.host.state is TrainerState.REPLAYING, "it repeats all steps"
        (warning,) = course.host.trainer.warnings
        assert "goes on from the beginning" in warning and "step-3: the checksum differs" in warning
        assert [e["checkpoint"] for e in course.desk.log if e["event"] == "checkpoint_corrupt"]


async def test_without_any_checkpoint_and_replay_people_choose(open_course: Callable[..., Course]) -> None:
    course = open_course(policies={"solver": {"trainer": {"replay": False}}}, max_staleness=8)
    trainer = course.trainer()
    async with training(course):
        trainer.join()
        course.group("first")
        await step(course, trainer)
        course.host.trainer.left()
        damaged(course, course.trainer(), at=0)
        assert "trainer.replay = true to repeat all 1 steps" in course.host.halted


async def test_copies_and_damage_are_told(open_course: Callable[..., Course]) -> None:
    course = open_course()
    desk = course.desk
    watch = LedgerWatch(desk.ledger, every_s=600.0, events=desk.events)
    course.group("first")
    assert await watch.back_up() > 0 and watch.warnings == []
    with sqlite3.connect(desk.run_dir / "ledger.sqlite") as db:
        db.execute("UPDATE groups SET size = 7")
    db.close()
    assert await watch.back_up() == 0.0
    assert "wingbeat ledger restore" in watch.warnings[0]
    assert [e["event"] for e in desk.log if e["event"].startswith("ledger")] == ["ledger_backup", "ledger_corrupt"]
