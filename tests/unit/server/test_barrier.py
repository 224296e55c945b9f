"""The barrier at work: a policy's step loop is held back, goes on, and the status says for whom it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wingbeat.server.status import NEVER_CALLED, blockers

TWO = {"solver": {}, "verifier": {}}


@pytest.fixture
def course(open_course: Callable[..., Any]) -> Any:
    course = open_course(policies=TWO, groups_per_step=1, max_staleness=9, barrier=True)
    course.desk.error = None
    return course


async def test_no_policy_steps_before_the_others_have(course: Any) -> None:
    solver, verifier = course.host, course.desk.policies["verifier"]
    trainer = course.trainer()
    run = asyncio.create_task(solver.run(course.after_step))
    trainer.join()
    for name in ("a", "b"):
        course.group(name)
    await course.until(lambda: trainer.steps)
    trainer.done(1)
    await course.until(lambda: course.finished)
    for _ in range(20):
        course.desk.changed.notify()
        await asyncio.sleep(0)
    assert trainer.steps == [(1, False)]
    verifier.version = 1
    course.desk.changed.notify()
    await course.until(lambda: len(trainer.steps) == 2)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_policies_that_have_halted_hold_nobody_back(course: Any) -> None:
    course.host.version = 3
    assert not course.host.context.may_pass("solver", 3)
    course.desk.policies["verifier"].halt("its trainer is out of memory")
    assert course.host.context.may_pass("solver", 3)


async def test_the_status_names_the_policy_that_all_wait_for(course: Any) -> None:
    desk, solver, verifier = course.desk, course.host, course.desk.policies["verifier"]
    solver.version = 1
    assert not any("barrier" in text for text in blockers(desk)), "it has no batch of its own yet"
    course.group("a")
    (found,) = [text for text in blockers(desk) if text.startswith("barrier")]
    assert found == f"barrier: 'solver' waits for 'verifier', which has 0 of 1 groups for step 1{NEVER_CALLED}"
    (group,) = solver.buffer.clear()
    solver.buffer.add(group)
    verifier.buffer.add(replace(group, policy="verifier"))
    assert not any("barrier" in text for text in blockers(desk)), "the other one may step"
    verifier.buffer.clear()
    (found,) = [text for text in blockers(desk) if text.startswith("barrier")]
    assert found == "barrier: 'solver' waits for 'verifier', which has 0 of 1 groups for step 1"


async def test_whoever_waits_at_the_barrier_admits_what_the_other_one_needs(course: Any) -> None:
    solver, verifier = course.host, course.desk.policies["verifier"]
    for index in range(10):  # all that the bound of 9 admits
        course.group(f"g{index}")
    assert not solver.admits_group()
    solver.version = 1
    assert not solver.admits_group(), "the verifier was never called: more groups would not help"
    (group, *_) = solver.buffer.clear()
    for index in range(10):
        course.group(f"h{index}", floor=1)
    verifier.buffer.add(replace(group, policy="verifier"))
    assert not solver.admits_group(), "the verifier has its batch"
    verifier.buffer.clear()
    assert solver.admits_group()


async def test_without_a_barrier_nobody_waits(open_course: Callable[..., Any]) -> None:
    course = open_course(policies=TWO, groups_per_step=1, max_staleness=9)
    course.desk.error = None
    course.host.version = 5
    course.group("a")
    assert course.host.context.may_pass("solver", 5)
    assert not any("barrier" in text for text in blockers(course.desk))
