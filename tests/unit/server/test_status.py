"""What a run says that it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.protocol import BeginReply, BeginRequest, FinishRequest, GroupModel, TaskModel
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.server.episodes.untrained import IN_A_ROW
from wingbeat.server.status import NO_TASKS, blockers


@pytest.fixture
def desk(open_desk: Callable[..., Any]) -> Any:
    """Room for two groups; no task to deal out."""
    desk = open_desk(max_staleness=1)
    desk.error = None
    desk.dealer = TaskDealer(0)
    return desk


async def begin(desk: Any, group: str, key: str) -> BeginReply:
    request = BeginRequest(idempotency_key=key, task=TaskModel(id="t"), group=GroupModel(id=group, size=2))
    return await desk.rollouts.begin(request, base_url="http://here/v1")


async def end(desk: Any, episode_id: str) -> None:
    await desk.finishing.finish(desk.episode(episode_id), FinishRequest(rewards=1.0))


async def test_no_tasks_is_no_blocker_while_clients_run_their_own(desk: Any) -> None:
    assert NO_TASKS in blockers(desk)
    first = await begin(desk, "rg", "1")
    assert NO_TASKS not in blockers(desk)
    await end(desk, first.episode_id)
    assert NO_TASKS not in blockers(desk), "its group waits for the second member"
    await end(desk, (await begin(desk, "rg", "2")).episode_id)
    assert NO_TASKS in blockers(desk)


def test_groups_that_fill_no_batch_are_no_work(open_course: Callable[..., Any]) -> None:
    course = open_course(groups_per_step=2)
    course.desk.error = None
    course.desk.dealer.remove("src")
    for name in "ab":
        assert NO_TASKS in blockers(course.desk)
        course.group(name)
    assert len(course.host.buffer) == 2 and NO_TASKS not in blockers(course.desk), "a batch is full"


async def test_a_waiting_group_counts_its_own_members(desk: Any) -> None:
    first = await begin(desk, "one", "1")
    await begin(desk, "one", "2")
    await begin(desk, "two", "3")
    await begin(desk, "two", "4")
    await end(desk, first.episode_id)
    (found,) = [text for text in blockers(desk) if "are running" in text]
    assert found == f"group {first.group.id} has 1 of 2 episodes; 1 are running"


async def test_episodes_without_a_trainable_turn_are_named(desk: Any) -> None:
    for number in range(IN_A_ROW):
        assert not any("called no trainable policy" in text for text in blockers(desk))
        await end(desk, (await begin(desk, f"g{number // 2}", f"{number}")).episode_id)
    (found,) = [text for text in blockers(desk) if "called no trainable policy" in text]
    assert found.startswith("the last 4 episodes called no trainable policy; they made no model call:")
    assert "'solver' (`episode.model`)" in found
