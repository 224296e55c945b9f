"""A trainer that cannot come back to where control stands: control goes back, and nothing trains twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from wingbeat.core.errors import NoEngine
from wingbeat.core.protocol import EvaluationRequest
from wingbeat.core.types import FinishReason, Split, Task
from wingbeat.core.weight_protocol import KeepVersions, ReleaseVersion, UpdateWeights
from wingbeat.core.worker_protocol import BeginLineage, TrainStep
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.policies.host import TrainerState

Course = Any
NO_REPLAY = {"solver": {"trainer": {"replay": False}}}


@asynccontextmanager
async def training(course: Course) -> AsyncIterator[asyncio.Task[None]]:
    run = asyncio.create_task(course.host.run(course.after_step))
    yield run
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    course.desk.check_writes()
    assert course.desk.ledger.verify() == []


async def train(course: Course, trainer: Any, *, steps: int, lineage: int = 0) -> None:
    """Take so many more steps, each on a group sampled by the newest version."""
    for _ in range(steps):
        version, told = course.host.version, len(trainer.steps)
        course.group(f"g{lineage}.{version}", floor=version)
        await course.until(lambda told=told: len(trainer.steps) > told)
        trainer.done(version + 1, lineage=lineage)
        await course.until(lambda version=version: course.finished and course.finished[-1][0] == version + 1)


async def roll_back(course: Course) -> Any:
    """The trainer dies; its successor stands at step 1, and is given the first step of the lineage that it begins."""
    course.host.trainer.left()
    second = course.trainer()
    second.join(step=1)
    second.begin(1)
    await course.until(lambda: second.steps)
    return second


def states(course: Course) -> dict[str, SampleState]:
    views = course.desk.ledger.attempts(split=Split.TRAIN)
    return {view.group.id: view.samples[0].state for view in views if view.samples}


def waiting(course: Course) -> dict[str, tuple[int, int | None]]:
    """Buffered groups: floor and lowest version."""
    groups = course.host.buffer.clear()
    for group in groups:
        course.host.buffer.add(group)
    return {g.group_id: (g.floor_version, min(m.min_version for m in g.members)) for g in groups}


async def test_without_replay_the_lost_steps_train_again_in_a_new_lineage(
    open_course: Callable[..., Course], join_engine: Any
) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    engine, first = join_engine(course.desk.engines), course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=3)
        course.host.trainer.left()
        second = course.trainer()
        second.join(step=1)
        assert second.of(BeginLineage)[-1].lineage == 1 and second.steps == []
        assert course.host.state is TrainerState.ROLLING_BACK
        second.begin(1)
        await course.until(lambda: second.steps)
        assert (course.host.version, course.host.ancestry.current) == (1, 1)
        engine.catch_up()
        (told,) = [m.manifest for m in engine.of(UpdateWeights)][-1:]
        assert (told.version, told.lineage) == (1, 1)
        batch = course.desk.ledger.batches_after("solver", 1)[0]
        assert (batch.batch_id, batch.step, batch.lineage) == ("solver-1.2", 2, 1)
        assert {e.group_id for e in batch.episodes} == {"g0.1"}  # oldest first
        second.done(2, lineage=1)
        await course.until(lambda: len(second.steps) == 2)
        await finish_in(course, second, lineage=1)
        assert states(course) == dict.fromkeys(("g0.0", "g0.1", "g0.2"), SampleState.TRAINED)
        event = next(e for e in course.desk.log if e["event"] == "lineage_began")
        assert (event["lineage"], event["base_step"], event["lost_steps"], event["reason"]) == (
            1,
            1,
            2,
            "replay is off",
        )


async def test_versions_of_what_waits_count_as_the_last_one_that_survives(open_course: Callable[..., Course]) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8, groups_per_step=1)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=3)
        course.host.trainer.left()
        course.group("buffered", floor=3)
        open_spec = GroupSpec("open", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 3})
        course.desk.book.open_group(open_spec)
        second = course.trainer()
        second.join(step=1)
        second.begin(1)
        await course.until(lambda: second.steps)
        assert waiting(course) == {"g0.2": (1, 1), "buffered": (1, 1)}
        assert course.desk.book.floors("solver") == [1]


async def test_a_failed_replay_begins_a_lineage_where_the_trainer_then_stands(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(max_staleness=8)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=3)
        course.host.trainer.left()
        second = course.trainer()
        second.join(step=0)
        assert second.steps == [(1, True), (2, True), (3, True)]
        second.done(1)
        second.fail(error="out of memory")  # step 2
        second.fail(error="not taken")  # step 3, which was on its way
        assert [m.lineage for m in second.of(BeginLineage)] == [1]
        second.begin(0)  # its last checkpoint
        await course.until(lambda: second.steps[-1] == (1, False))
        assert course.host.version == 0 and not course.host.halted
        assert set(waiting(course)) == {"g0.1", "g0.2"}
        (lineage,) = course.desk.ledger.lineages()
        assert lineage.base_step == 0 and "out of memory" in lineage.reason
        await finish_in(course, second, lineage=1)


@pytest.mark.parametrize("is_exact", [True, False])
async def test_a_replay_of_a_step_that_was_never_published_is_held_to_the_last_one_that_was(
    open_course: Callable[..., Course], is_exact: bool
) -> None:
    course = open_course(max_staleness=8)
    first, second = course.trainer(), course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=2)
        course.group("g0.2", floor=2)
        await course.until(lambda: len(first.steps) == 3)
        first.stepped(3)
        await course.until(lambda: course.finished[-1][0] == 3)
        course.host.trainer.left()  # step 3 counts, and is not published
        second.join(step=0)
        assert [message.publish for message in second.of(TrainStep)] == [False, True, True]
        second.done(2, checksum=None if is_exact else "other")
        second.done(3)
        released = [m.checksum for m in second.of(ReleaseVersion) if m.version == 2]
        if is_exact:
            assert second.of(BeginLineage) == [] and course.host.known_checksum == "sum-3"
        else:
            assert released == ["other"] and course.host.state is TrainerState.ROLLING_BACK
            second.begin(3)
            await course.until_changed(lambda: course.host.state is TrainerState.READY)
            (lineage,) = course.desk.ledger.lineages()
            assert lineage.base_step == 3 and "replay of step 2 gave other weights" in lineage.reason


async def finish_in(course: Course, trainer: Any, *, lineage: int) -> None:
    """The step that is under way ends."""
    before = len(course.finished)
    trainer.done(course.host.version + 1, lineage=lineage)
    await course.until(lambda: len(course.finished) > before)


async def test_a_logged_step_is_given_up_with_its_lineage(open_course: Callable[..., Course]) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=2)
        course.group("pending", floor=2)
        await course.until(lambda: len(first.steps) == 3)
        second = await roll_back(course)
        assert not any(batch.batch_id == "solver-3" for batch in course.desk.ledger.batches_after("solver", 0))
        assert set(waiting(course)) == {"pending"}  # g0.1 is in the step
        await finish_in(course, second, lineage=1)
        await course.until(lambda: len(second.steps) == 2)
        await finish_in(course, second, lineage=1)
        assert set(states(course).values()) == {SampleState.TRAINED}


async def test_a_run_that_was_complete_trains_its_lost_steps_again(open_course: Callable[..., Course]) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8, steps=2)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=2)
        assert course.host.complete
        second = await roll_back(course)
        assert not course.host.complete
        await finish_in(course, second, lineage=1)
        assert course.host.complete and set(states(course).values()) == {SampleState.TRAINED}


async def test_without_replay_a_trainer_at_our_step_loses_nothing(open_course: Callable[..., Course]) -> None:
    course = open_course(policies=NO_REPLAY)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=1)
        course.group("pending", floor=1)
        await course.until(lambda: len(first.steps) == 2)
        course.host.trainer.left()
        second = course.trainer()
        second.join(step=1)
        assert second.steps == [(2, False)] and second.of(BeginLineage) == []


async def test_a_trainer_with_an_abandoned_checkpoint_is_followed(open_course: Callable[..., Course]) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=3)
        second = await roll_back(course)
        await finish_in(course, second, lineage=1)  # g0.1 is trained again
        course.host.trainer.left()
        third = course.trainer()
        third.join(step=3)  # of lineage 0: it holds g0.1 and g0.2
        assert [m.lineage for m in third.of(BeginLineage)] == [2]
        third.begin(3, base_lineage=0)
        await course.until_changed(lambda: course.host.state is TrainerState.READY)
        assert (course.host.version, course.host.ancestry.current) == (3, 2)
        assert set(states(course).values()) == {SampleState.TRAINED} and waiting(course) == {}


async def test_a_lineage_that_control_did_not_live_to_record_is_recorded_when_the_trainer_returns(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(max_staleness=8)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=2)
        course.host.trainer.left()
        second = course.trainer()
        second.join(step=1, lineage=1)
        await course.until(lambda: second.steps)
        assert (course.host.version, course.host.ancestry.current) == (1, 1)
        await finish_in(course, second, lineage=1)


async def test_a_trainer_that_dies_while_the_rollback_is_written_is_followed_by_its_successor(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=2)
        course.host.trainer.left()
        second = course.trainer()
        second.join(step=1)
        second.begin(1)
        course.host.trainer.left()
        third = course.trainer()
        third.join(step=0)
        assert third.sent == []  # one rollback at a time
        await course.until(lambda: third.of(BeginLineage))
        third.begin(0)
        await course.until(lambda: third.steps)
        assert (course.host.version, course.host.ancestry.current) == (0, 2)
        assert [(x.base_lineage, x.base_step) for x in course.desk.ledger.lineages()] == [(0, 1), (0, 0)]


async def test_while_a_rollback_is_written_no_group_starts_and_none_that_ends_is_lost(
    open_course: Callable[..., Course],
) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    first = course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=2)
        course.host.trainer.left()
        course.group("waiting", floor=2)
        (ready,) = course.desk.ledger.unconsumed("solver") or course.host.buffer.clear()
        assert course.host.admits_group()
        second = course.trainer()
        second.join(step=1)
        second.begin(1)
        assert not course.host.admits_group()
        course.host.add_group(replace(ready, group_id="meanwhile"))
        await course.until(lambda: second.steps)
        assert set(waiting(course)) == {"waiting", "meanwhile"} and course.host.admits_group()


async def test_weights_that_two_lineages_share_stay_while_they_are_live(
    open_course: Callable[..., Course], join_engine: Any
) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    engine, first = join_engine(course.desk.engines), course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=1)
        course.host.pin(1)  # so that its file is known under lineage 0, too
        await train(course, first, steps=1)
        engine.serve(2)
        second = await roll_back(course)
        course.host.unpin(1)
        engine.serve(1, lineage=1)
        course.host.release_unused()
        assert {m.version for m in second.of(ReleaseVersion)} == {0, 2}
        assert second.of(KeepVersions)[-1].checksums == ("sum-1",)  # what engines hold needs no file


async def test_what_abandoned_weights_still_sample_counts_as_the_common_version(
    open_course: Callable[..., Course], join_engine: Any, template: Any
) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    engine, first = join_engine(course.desk.engines), course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=3)
        engine.serve(3)
        assert course.host.lowest_version() == 3
        await roll_back(course)
        assert course.host.lowest_version() == 1  # the engine has yet to go back
        chunks = course.desk.engines.generate(
            "solver", prompt_ids=course.prompt(), sampling=course.sampling(), cache_key="e", stream=True
        )
        reading = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0)
        request_id = engine.generated()[-1]
        engine.say(request_id, 5, version=3)
        assert (await reading).version == 1
        engine.serve(1, lineage=1)
        engine.say(request_id, 6, version=1, lineage=1, finish=FinishReason.STOP)
        assert [chunk.version async for chunk in chunks] == [1]


async def test_a_generation_that_waits_for_an_abandoned_version_goes_to_what_counts_as_it(
    open_course: Callable[..., Course], join_engine: Any
) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    engine, first = join_engine(course.desk.engines), course.trainer()
    async with training(course):
        first.join()
        await train(course, first, steps=3)
        engine.serve(3)
        engine.link.capacity = 1
        ask = {"prompt_ids": course.prompt(), "sampling": course.sampling(), "floor": 3}
        tasks = [
            asyncio.create_task(anext(course.desk.engines.generate("solver", cache_key=key, **ask))) for key in "abc"
        ]
        await asyncio.sleep(0)
        assert course.desk.engines.waiting == 1
        await roll_back(course)
        engine.serve(1, lineage=1)
        for request_id in engine.generated():
            engine.say(request_id, 5, version=1, lineage=1, finish=FinishReason.STOP)
        assert course.desk.engines.waiting == 0 and len(engine.generated()) == 3
        engine.say(engine.generated()[-1], 5, version=1, lineage=1, finish=FinishReason.STOP)
        assert {(await task).version for task in tasks} == {1}


async def test_an_evaluation_keeps_its_abandoned_version_until_it_is_done(
    open_course: Callable[..., Course], join_engine: Any
) -> None:
    course = open_course(policies=NO_REPLAY, max_staleness=8)
    engine, first, host = join_engine(course.desk.engines), course.trainer(), course.host
    async with training(course):
        first.join()
        await train(course, first, steps=2)
        engine.serve(2)
        host.pin(2)
        engine.serve(2, pinned=True)
        second = await roll_back(course)
        chunks = course.desk.engines.generate(
            "solver", prompt_ids=course.prompt(), sampling=course.sampling(), cache_key="e", version=2
        )
        reading = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0)
        engine.say(engine.generated()[-1], 5, version=2, finish=FinishReason.STOP)
        assert (await reading).version == 2  # that is what it asked for
        await chunks.aclose()
        engine.serve(1, lineage=1)
        host.release_unused()
        assert host.is_pinned(2) and not [m for m in second.of(ReleaseVersion) if m.version == 2]
        second.done(2, lineage=1, checksum="other")
        await course.until(lambda: host.version == 2)
        assert host.manifest_of(2) is None  # engines know pins by number, and this one is taken
        for version in (None, 2):
            with pytest.raises(NoEngine, match="abandoned version 2 of policy 'solver'"):
                course.desk.evaluations.start(EvaluationRequest(policy="solver", name="again", version=version))
        assert "no longer held; the live one is 2" in host.missing(7)
        engine.serve(2, lineage=1)
        host.unpin(2)
        assert host.manifest_of(2) is not None and host.manifest_of(2).checksum == "other"
        released = [m.checksum for m in second.of(ReleaseVersion)]
        assert "sum-2" in released and "other" not in released


@pytest.mark.parametrize("command", ["save_checkpoint", "publish_weights"])
async def test_what_may_be_tried_again_does_not_end_training(open_course: Callable[..., Course], command: str) -> None:
    course = open_course()
    trainer = course.trainer()
    async with training(course):
        trainer.join()
        course.group("a")
        await course.until(lambda: trainer.steps)
        trainer.fail(command, "no space left on device")
        assert not course.host.halted
        assert bool(course.host.trainer.problem) == (command == "publish_weights")
        trainer.done(1)
        await course.until(lambda: course.host.version == 1)
        assert course.host.trainer.problem == ""


async def test_a_lineage_that_the_trainer_cannot_begin_ends_training(open_course: Callable[..., Course]) -> None:
    course = open_course(policies=NO_REPLAY)
    first = course.trainer()
    async with training(course) as run:
        first.join()
        await train(course, first, steps=1)
        course.host.trainer.left()
        second = course.trainer()
        second.join(step=0)
        second.fail("begin_lineage", "the checkpoint cannot be read")
        await asyncio.wait_for(asyncio.shield(run), 10)
        assert "no new lineage: the checkpoint cannot be read" in course.host.halted


async def test_on_a_full_disk_no_step_is_taken(
    open_course: Callable[..., Course], monkeypatch: pytest.MonkeyPatch
) -> None:
    course = open_course()
    trainer = course.trainer()
    course.group("a")
    is_full = {"now": True}
    monkeypatch.setattr(type(course.desk.ledger), "blocked", property(lambda self: "full" if is_full["now"] else ""))
    async with training(course):
        trainer.join()
        for _ in range(20):
            await asyncio.sleep(0)
        assert trainer.steps == [] and course.host.state is TrainerState.READY
        is_full["now"] = False
        course.desk.changed.notify()
        await course.until(lambda: trainer.steps)
        await finish_in(course, trainer, lineage=0)
