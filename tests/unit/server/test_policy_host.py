"""One policy's clock: its step loop, its trainer that comes and goes, its versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wingbeat.core.types import Split, Task
from wingbeat.core.weight_protocol import KeepVersions, Manifest, PinVersion, ReleaseVersion, UnpinVersion
from wingbeat.core.worker_protocol import CheckpointSaved, Export, Exported, Failed, SaveCheckpoint, TrainStep
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.policies.host import TrainerState

Make = Callable[..., Manifest]
Course = Any
"""A desk with a policy in training (conftest)."""


async def test_the_step_loop_trains_until_the_run_is_complete(open_course: Callable[..., Course]) -> None:
    course = open_course(steps=2)
    trainer = course.trainer()
    course.group("a")
    course.group("b")
    run = asyncio.create_task(course.host.run(course.after_step))
    trainer.join()
    await course.until(lambda: trainer.steps == [(1, False)])
    assert course.host.state is TrainerState.TRAINING
    (logged,) = course.desk.ledger.batches_after("solver", 0)  # durable before the trainer saw it
    assert logged == trainer.of(TrainStep)[0].batch
    assert {e.group_id for e in logged.episodes} == {"a"}
    trainer.done(1, trained_tokens=2.0)
    await course.until(lambda: len(trainer.steps) == 2)
    assert (course.host.version, course.host.complete) == (1, False)
    trainer.done(2, trained_tokens=3.0)
    await course.until(lambda: len(course.finished) == 2)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert course.finished == [(1, {"trained_tokens": 2.0}), (2, {"trained_tokens": 3.0})]
    assert course.host.complete and course.host.trained_tokens == 5
    assert [m.step for m in trainer.of(SaveCheckpoint)] == [2]  # the last step is always saved
    assert course.desk.ledger.summary().trained_step == {"solver": 2}
    seeds = {b.seed for b in course.desk.ledger.batches_after("solver", 0)}
    assert len(seeds) == 2
    course.desk.check_writes()


async def test_a_trainer_that_dies_in_a_step_is_replaced_and_repeats_what_it_lost(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(steps=3)
    first = course.trainer()
    for name in ("a", "b"):
        course.group(name)
    run = asyncio.create_task(course.host.run(course.after_step))
    first.join()
    await course.until(lambda: first.steps)
    first.done(1)
    await course.until(lambda: len(first.steps) == 2)
    course.host.trainer.left()
    assert course.host.state is TrainerState.ABSENT and not course.host.has_trainer
    second = course.trainer()
    second.join(step=0)  # its last checkpoint is older
    assert second.steps == [(1, True)]
    assert course.host.state is TrainerState.REPLAYING
    second.done(1)  # here control stands: the same weights again
    assert course.host.version == 1 and course.host.state is TrainerState.TRAINING
    assert second.steps == [(1, True), (2, False)]
    second.done(2)
    await course.until(lambda: course.host.version == 2)
    assert course.host.state is TrainerState.READY
    assert [e["exact"] for e in course.desk.log if e["event"] == "replayed"] == [True]
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize(("expected", "told"), [(False, 1), (True, 0)])
async def test_a_trainer_that_was_told_to_end_is_not_lost(
    open_course: Callable[..., Course], expected: bool, told: int
) -> None:
    course = open_course(steps=3)
    course.trainer().join()
    course.host.trainer.left(expected=expected)
    assert course.host.state is TrainerState.ABSENT
    assert len([e for e in course.desk.log if e["event"] == "trainer_lost"]) == told


async def test_a_replay_that_gives_other_weights_is_told_and_served(open_course: Callable[..., Course]) -> None:
    course = open_course(steps=3)
    first = course.trainer()
    course.group("a")
    run = asyncio.create_task(course.host.run(course.after_step))
    first.join()
    await course.until(lambda: first.steps)
    first.done(1)
    await course.until(lambda: course.host.version == 1)
    course.host.trainer.left()
    second = course.trainer()
    second.join(step=0)
    second.done(1, checksum="other")
    assert [e["exact"] for e in course.desk.log if e["event"] == "replayed"] == [False]
    assert course.host.state is TrainerState.ROLLING_BACK
    second.begin(1, checksum="other")
    await course.until_changed(lambda: course.host.state is TrainerState.READY)
    assert (course.host.version, course.host.ancestry.current) == (1, 1)  # the version and its samples keep
    assert course.host.manifest is not None
    assert (course.host.manifest.checksum, course.host.manifest.lineage) == ("other", 1)
    assert course.desk.ledger.summary().trained_step == {"solver": 1} and course.desk.ledger.verify() == []
    (lineage,) = course.desk.ledger.lineages()
    assert (lineage.base_step, "inexact" in lineage.reason) == (1, True)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_without_a_trainer_the_logged_step_waits_for_one(open_course: Callable[..., Course]) -> None:
    course = open_course(steps=1)
    first = course.trainer()
    course.group("a")
    run = asyncio.create_task(course.host.run(course.after_step))
    first.join()
    await course.until(lambda: first.steps)
    course.host.trainer.left()
    second = course.trainer()
    second.join(step=1)  # it had ended the step, but control did not hear of it
    assert second.steps == [] and course.host.state is TrainerState.TRAINING
    second.done(1)
    await course.until(lambda: course.finished)
    assert course.host.version == 1 and course.host.complete
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_a_failed_step_halts_this_policy_with_its_reason(open_course: Callable[..., Course]) -> None:
    course = open_course(steps=3)
    trainer = course.trainer()
    course.group("a")
    run = asyncio.create_task(course.host.run(course.after_step))
    trainer.join()
    await course.until(lambda: trainer.steps)
    course.host.trainer.failed(Failed("solver", "train_step", "loss is NaN"))
    await asyncio.wait_for(run, 10)
    assert course.host.halted == "training of 'solver' stopped: loss is NaN"
    assert course.host.complete and course.finished == [] and course.host.version == 0
    assert course.desk.overlap.fraction == 0.0


async def test_exports_end_with_their_answer_their_failure_or_their_trainer(open_course: Callable[..., Course]) -> None:
    course = open_course()
    trainer, path = course.trainer(), course.desk.ledger  # any object: only its text travels
    with pytest.raises(RuntimeError, match="no trainer"):
        await course.host.export(path)
    trainer.join()
    done = asyncio.create_task(course.host.export(path))
    await asyncio.sleep(0)
    course.host.trainer.exported(Exported("solver", 0, trainer.of(Export)[0].path))
    assert (await done).step == 0
    failing = asyncio.create_task(course.host.export(path))
    await asyncio.sleep(0)
    course.host.trainer.failed(Failed("solver", "export", "disk full"))
    with pytest.raises(RuntimeError, match="disk full"):
        await failing
    assert not course.host.halted
    lost = asyncio.create_task(course.host.export(path))
    await asyncio.sleep(0)
    course.host.trainer.left()
    with pytest.raises(ConnectionError):
        await lost


def test_checkpoints_are_recorded(open_course: Callable[..., Course]) -> None:
    course = open_course()
    course.host.trainer.checkpoint_saved(CheckpointSaved("solver", 4, "/checkpoints/4"))
    course.desk.check_writes()
    assert [c.step for c in course.desk.ledger.checkpoints("solver")] == [4]


def test_admission_counts_what_can_still_be_trained_in_time(open_course: Callable[..., Course]) -> None:
    course = open_course(groups_per_step=2, max_staleness=1, steps=100)
    for index in range(4):  # (max_staleness + 1) * groups_per_step
        assert course.host.admits_group()
        spec = GroupSpec(f"g{index}", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})
        course.desk.book.open_group(spec)
    assert not course.host.admits_group()


async def test_while_a_step_is_under_way_admission_counts_from_the_next_version(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(groups_per_step=1, max_staleness=1, steps=100)
    trainer = course.trainer()
    course.group("a")
    run = asyncio.create_task(course.host.run(course.after_step))
    trainer.join()
    await course.until(lambda: trainer.steps)
    # The batch has left the buffer and will make version 1: one more group of floor 0 trains at 1, a second would at 2.
    assert course.host.admits_group()
    course.desk.book.open_group(GroupSpec("b", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0}))
    assert not course.host.admits_group()
    trainer.done(1)
    await course.until(lambda: course.host.version == 1)
    assert course.host.admits_group()  # floor 1 trains at 2
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


def test_no_more_groups_than_the_remaining_steps_need(open_course: Callable[..., Course]) -> None:
    course = open_course(groups_per_step=1, max_staleness=9, steps=2)
    for index in range(2):
        assert course.host.admits_group()
        spec = GroupSpec(f"g{index}", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})
        course.desk.book.open_group(spec)
    assert not course.host.admits_group()


async def test_a_step_waits_for_the_oldest_group_and_then_no_longer(
    open_course: Callable[..., Course], clock: Any
) -> None:
    course = open_course(groups_per_step=1, max_staleness=1, straggler_wait_s=5.0)
    course.host.restore(version=1)
    trainer = course.trainer()
    for name, floor in (("old", 0), ("other", -1)):  # the other is over age already: not waited for
        spec = GroupSpec(name, Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": floor})
        course.desk.book.open_group(spec)
    course.group("a", floor=1)
    run = asyncio.create_task(course.host.run(course.after_step))
    trainer.join(1)
    await asyncio.sleep(0)
    course.desk.changed.notify()
    await asyncio.sleep(0)
    await asyncio.wrap_future(course.desk.ledger.save_dealer_state({}))  # after a batch, had one been logged
    await asyncio.sleep(0)
    assert trainer.steps == []
    assert not course.host.loop.in_step
    clock.now += 5.0
    course.desk.changed.notify()
    await course.until(lambda: trainer.steps)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_versions_are_released_once_no_engine_pin_or_trainer_needs_them(
    open_course: Callable[..., Course], join_engine: Any
) -> None:
    course = open_course(steps=10)
    engine, trainer, host = join_engine(course.desk.engines), course.trainer(), course.host
    run = asyncio.create_task(host.run(course.after_step))
    trainer.join()
    engine.serve(0)
    host.pin(0)
    host.pin(0)
    assert len(engine.of(PinVersion)) == 1  # two evaluations share it
    for step in (1, 2):
        course.group(f"g{step}", floor=step - 1)
        await course.until(lambda step=step: len(trainer.steps) == step)
        trainer.done(step)
        await course.until(lambda step=step: host.version == step)
        engine.serve(step)
        host.release_unused()
    assert [m.version for m in trainer.of(ReleaseVersion)] == [1]
    assert host.manifest_of(0) is not None and host.is_pinned(0)
    host.unpin(0)
    assert not engine.of(UnpinVersion)
    host.unpin(0)
    assert len(engine.of(UnpinVersion)) == 1 and not host.is_pinned(0)
    assert [m.version for m in trainer.of(ReleaseVersion)] == [1, 0]
    assert host.manifest_of(0) is None and host.manifest_of(2) is not None
    assert host.lowest_version() == 2
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_a_returning_trainer_does_not_lose_the_file_of_a_pinned_version(
    open_course: Callable[..., Course], join_engine: Any
) -> None:
    course = open_course(steps=10)
    engine, first, host = join_engine(course.desk.engines), course.trainer(), course.host
    run = asyncio.create_task(host.run(course.after_step))
    first.join()
    engine.serve(0)
    host.pin(0)
    for step in (1, 2):
        course.group(f"g{step}", floor=step - 1)
        await course.until(lambda step=step: len(first.steps) == step)
        first.done(step)
        await course.until(lambda step=step: host.version == step)
        engine.serve(step)
        host.release_unused()
    host.trainer.left()
    second = course.trainer()
    second.join(step=0)
    assert second.of(ReleaseVersion) == []  # 0 is pinned
    assert [m.publish for m in second.of(TrainStep)] == [False, True]  # 1 is only needed to get to 2
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


def test_a_frozen_policy_serves_its_folder_and_admits_everything(open_desk: Any) -> None:
    desk = open_desk(policies={"solver": {}, "judge": {"trainable": False}})
    judge = desk.policies["judge"]
    assert judge.state is TrainerState.FROZEN and judge.complete and judge.admits_group()
    assert judge.manifest is not None and (judge.manifest.path, judge.manifest.version) == ("", 0)


def test_groups_of_equal_rewards_are_counted_in_a_row(open_course: Callable[..., Course]) -> None:
    course = open_course()
    course.group("a", (1.0, 1.0))
    course.group("b", (0.0, 0.0))
    assert course.host.equal_groups == 2
    course.group("c", (0.0, 1.0))
    assert course.host.equal_groups == 0


async def test_a_step_is_given_once_although_its_trainer_says_where_it_stands_after_it_ended_one(
    open_course: Callable[..., Course],
) -> None:
    course = open_course()
    first = course.trainer()
    run = asyncio.create_task(course.host.run(course.after_step))
    first.join()
    course.group("g0")
    await course.until(lambda: first.steps)
    course.host.trainer.left()  # the link broke in the middle of the step
    again = course.trainer()
    again.connect(course.host)
    again.done(1)  # ended before it could say where it stands
    course.group("g1")
    await course.until(lambda: again.steps)
    again.ready(1)
    again.done(1)  # said again
    assert again.steps == [(2, False)] and course.host.state is TrainerState.TRAINING
    again.done(2)
    await course.until(lambda: len(course.finished) == 2)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_a_failure_of_an_earlier_connection_halts_nobody(open_course: Callable[..., Course]) -> None:
    course = open_course()
    trainer = course.trainer()
    trainer.connect(course.host)
    trainer.fail(error="a step that it repeated for a control that died")
    assert not course.host.halted
    trainer.ready(0)
    trainer.fail(error="it cannot take a step")
    assert "it cannot take a step" in course.host.halted


async def test_weights_of_which_control_hears_too_early_are_not_deleted(open_course: Callable[..., Course]) -> None:
    course = open_course()
    first = course.trainer()
    run = asyncio.create_task(course.host.run(course.after_step))
    first.join()
    for step in (1, 2):
        course.group(f"g{step}")
        await course.until(lambda step=step: len(first.steps) == step)
        first.done(step)
    await course.until(lambda: len(course.finished) == 2)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    successor = course.successor()  # control died while its trainer repeated step 2, of which the next one hears
    trainer = course.trainer()
    trainer.connect(successor)
    trainer.done(2)
    trainer.ready(2)
    trainer.done(2)
    assert successor.manifest.version == 2 and trainer.of(ReleaseVersion) == []
    assert trainer.of(KeepVersions)[-1].checksums == ("sum-2",)


async def test_a_trainer_that_stands_with_control_is_told_what_to_keep(
    open_course: Callable[..., Course], join_engine: Any, make_manifest: Make
) -> None:
    course = open_course()
    engine = join_engine(course.desk.engines)
    trainer = course.trainer()
    trainer.join()
    assert trainer.of(KeepVersions)[-1].checksums == ("sum-0",)
    engine.serve(0)
    course.host.pin(0)
    course.host.trainer.left()
    course.host.version = 1
    course.host.published(make_manifest(1))
    engine.serve(1)
    again = course.trainer()
    again.join(1)
    assert again.of(KeepVersions)[-1].checksums == ("sum-0", "sum-1")  # of the pinned one, too


async def test_a_step_counts_before_its_weights_are_there(open_course: Callable[..., Course], join_engine: Any) -> None:
    course = open_course(max_staleness=3)
    engine, trainer, host = join_engine(course.desk.engines), course.trainer(), course.host
    run = asyncio.create_task(host.run(course.after_step))
    trainer.join()
    engine.serve(0)
    for step in (1, 2):
        course.group(f"g{step}")
        await course.until(lambda step=step: len(trainer.steps) == step)
        trainer.stepped(step)
    assert (host.version, host.newest, host.known_checksum) == (2, 0, "")
    assert host.lowest_version() == 0 and host.state is TrainerState.READY
    assert "still being published" in host.missing(2)
    waits = asyncio.create_task(host.until_published(2))
    await asyncio.sleep(0)
    trainer.publish(1)  # the one before
    await asyncio.sleep(0)
    assert (host.newest, host.known_checksum, waits.done()) == (1, "", False)
    trainer.publish(2)
    await asyncio.wait_for(waits, 10)
    assert (host.newest, host.known_checksum) == (2, "sum-2")
    course.desk.check_writes()
    assert [course.desk.ledger.weights_checksum("solver", step) for step in (1, 2)] == ["sum-1", "sum-2"]
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize("heard", [True, False])
async def test_whoever_dies_between_a_step_and_its_weights_loses_nothing(
    open_course: Callable[..., Course], heard: bool
) -> None:
    """Control dies, then its trainer; of the weights that were published control may have heard."""
    course = open_course()
    first = course.trainer()
    run = asyncio.create_task(course.host.run(course.after_step))
    first.join()
    course.group("g1")
    await course.until(lambda: first.steps)
    first.stepped(1)
    if heard:
        first.publish(1)
    await course.until(lambda: course.finished)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    successor = course.successor()
    assert (successor.version, successor.known_checksum) == (1, "sum-1" if heard else "")
    first.connect(successor)
    first.publish(1, checksum="of a replay for another control")  # it has not said where it stands
    assert successor.manifest is None
    successor.trainer.left()
    second = course.trainer()
    second.join(step=0)
    assert second.steps == [(1, True)]
    second.stepped(1)
    assert successor.state is TrainerState.REPLAYING
    second.publish(1, checksum="other")
    exact = [event["exact"] for event in course.desk.log if event["event"] == "replayed"]
    if heard:  # they were served: the replay is held to them
        assert exact == [False] and successor.state is TrainerState.ROLLING_BACK
    else:
        assert exact == [True] and successor.manifest is not None
        assert successor.manifest.checksum == successor.known_checksum == "other"
        course.desk.check_writes()
        assert course.desk.ledger.weights_checksum("solver", 1) == "other"


async def test_deltas_are_asked_for_where_engines_of_other_hosts_wait(
    open_course: Callable[..., Course], join_engine: Any
) -> None:
    course = open_course()
    course.host.context = replace(course.host.context, encodes_deltas=True)
    join_engine(course.desk.engines)
    trainer = course.trainer()
    run = asyncio.create_task(course.host.run(course.after_step))
    trainer.join()
    for step, elsewhere in ((1, False), (2, True)):
        if elsewhere:
            join_engine(course.desk.engines, "far").link.host_id = "elsewhere"
        course.group(f"g{step}")
        await course.until(lambda step=step: len(trainer.steps) == step)
        assert trainer.of(TrainStep)[-1].delta is elsewhere
        trainer.done(step)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_weights_that_are_late_are_waited_for_and_refused_ones_end_training(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(steps=3)
    course.trainer().join()
    trainer = course.host.trainer
    trainer.failed(Failed("solver", "publish_weights", "no way through"))
    assert "no way through" in trainer.problem and not course.host.halted
    trainer.left()
    assert trainer.problem == ""
    course.trainer().join()
    trainer.failed(Failed("solver", "publish_weights", "404", final=True))
    assert trainer.is_cut_off and course.host.halted.endswith("no engine would get its weights: 404")
    trainer.left()
    assert trainer.is_cut_off, "its end brings them to nobody"
    course.trainer().join()
    assert not trainer.is_cut_off
