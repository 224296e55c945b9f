"""Operators between closed groups and buffers: what the ledger, the buffer and the dealer learn of their decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.protocol import BeginRequest, FinishRequest, GroupModel, LeaseRequest, TaskModel
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.operators import build_chain

pytestmark = pytest.mark.unit

OpenDesk = Callable[..., Any]


async def close_group(desk: Any, *rewards: float, policies: tuple[str, ...] = ("solver",)) -> str:
    """A client's group whose episodes end with these rewards; each takes one turn of every policy."""
    group_id = f"ours-{len(desk.writes)}"
    return await _play(
        desk,
        [
            BeginRequest(
                idempotency_key=f"{group_id}-{i}",
                task=TaskModel(source="src", id="t0"),
                group=GroupModel(id=group_id, size=len(rewards)),
                policies=list(policies),
            )
            for i in range(len(rewards))
        ],
        rewards,
    )


async def close_leased(desk: Any, *rewards: float, logprob: float = -1.0) -> str:
    """The next group that is dealt; returns the task's id."""
    request = LeaseRequest(max_leases=len(rewards), splits=[Split.TRAIN], wait_s=0)
    leases = (await desk.rollouts.lease(request)).leases
    assert len(leases) == len(rewards)
    await _play(
        desk,
        [BeginRequest(idempotency_key=lease.lease_id, lease_id=lease.lease_id) for lease in leases],
        rewards,
        logprob=logprob,
    )
    return leases[0].task.id


async def _play(desk: Any, begins: list[BeginRequest], rewards: tuple[float, ...], *, logprob: float = -1.0) -> str:
    episodes = [desk.episode((await desk.rollouts.begin(b, base_url="http://here/v1")).episode_id) for b in begins]
    for episode, reward in zip(episodes, rewards, strict=True):
        for policy in episode.policies:
            desk.take_turn(episode, policy=policy, logprobs=(logprob, logprob))
        await desk.finishing.finish(episode, FinishRequest(rewards=reward, metrics={"steps": 2.0}))
    desk.check_writes()
    return episodes[0].group.id


def states(desk: Any) -> dict[tuple[str, str], int]:
    return {(c.policy, c.state): c.num_attempts for c in desk.ledger.summary().samples if c.num_attempts}


async def test_who_is_dropped_never_reaches_the_buffer_and_is_so_in_the_ledger(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=3, operators=[{"use": "reward_filter", "min": 0.5}], groups_per_step=9)
    group_id = await close_group(desk, 0.0, 1.0, 2.0)
    (waiting,) = desk.ledger.unconsumed("solver")
    assert waiting.group_id == group_id
    assert [m.reward for m in waiting.members] == [1.0, 2.0]
    assert len(desk.solver.buffer) == 1
    assert desk.solver.buffer.clear() == (waiting,)
    assert states(desk) == {("solver", "finished"): 2, ("solver", "dropped"): 1}
    (discarded,) = desk.solver.buffer.discards.items()
    assert (discarded[0], discarded[1].num_episodes, discarded[1].num_tokens) == ("reward_filter:reward_too_low", 1, 2)


async def test_shaping_is_what_the_ledger_gives_back(open_desk: OpenDesk) -> None:
    operators = [{"use": "reward_shaping", "metrics": {"steps": -0.25}}, {"use": "reward_clip", "min": 0.0}]
    desk = open_desk(operators=operators, groups_per_step=9)
    await close_group(desk, 0.25, 1.0)
    (waiting,) = desk.ledger.unconsumed("solver")
    assert [(m.reward, m.shaping, m.shaped_reward) for m in waiting.members] == [(0.25, -0.25, 0.0), (1.0, -0.5, 0.5)]
    assert desk.solver.buffer.clear() == (waiting,)
    assert desk.finishing.rewards_seen["solver"] == [0.25, 1.0]  # people see what was reported


async def test_a_group_dropped_whole_does_not_count_and_says_why(open_desk: OpenDesk) -> None:
    desk = open_desk(operators=[{"use": "zero_variance_filter"}], groups_per_step=9)
    await close_group(desk, 1.0, 1.0)
    assert len(desk.solver.buffer) == 0
    assert desk.ledger.unconsumed("solver") == ()
    (event,) = [e for e in desk.log if e["event"] == "group_dropped"]
    assert event["reason"] == "zero_variance_filter:equal_rewards"
    assert states(desk) == {("solver", "dropped"): 2}


async def test_operators_are_those_of_their_policy(open_desk: OpenDesk) -> None:
    operators = [{"use": "reward_filter", "min": 0.5, "policies": ["solver"]}]
    desk = open_desk(policies={"solver": {}, "verifier": {}}, operators=operators, groups_per_step=9)
    await close_group(desk, 0.0, 1.0, policies=("solver", "verifier"))
    kept = {name: [m.reward for m in desk.ledger.unconsumed(name)[0].members] for name in desk.policies}
    assert kept == {"solver": [1.0], "verifier": [0.0, 1.0]}


async def test_a_group_of_which_one_policy_keeps_something_is_not_dropped(open_desk: OpenDesk) -> None:
    operators = [{"use": "reward_filter", "min": 5, "policies": ["solver"]}]
    desk = open_desk(policies={"solver": {}, "verifier": {}}, operators=operators, groups_per_step=9)
    await close_group(desk, 0.0, 1.0, policies=("solver", "verifier"))
    assert [e for e in desk.log if e["event"] == "group_dropped"] == []
    assert [len(host.buffer) for host in desk.policies.values()] == [0, 1]


async def test_tasks_that_the_curriculum_refuses_are_passed_over(open_desk: OpenDesk) -> None:
    operators = [{"use": "curriculum_solved", "threshold": 0.5, "recheck": 0.0}]
    desk = open_desk(operators=operators, groups_per_step=64)
    solved = [await close_leased(desk, 1.0, 1.0), await close_leased(desk, 1.0, 1.0)]
    open_tasks = [await close_leased(desk, 0.0, 0.25) for _ in range(6)]
    assert set(open_tasks) == {f"t{i}" for i in range(4)} - set(solved)
    assert desk.solver.chain.metrics()["operator/curriculum_solved/refused"] > 0


async def test_operators_go_on_from_the_state_that_was_saved_with_the_last_group(open_desk: OpenDesk) -> None:
    operators = [{"use": "greso"}, {"use": "curriculum_solved"}]
    desk = open_desk(operators=operators, groups_per_step=64)
    for rewards in ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0)):
        await close_leased(desk, *rewards)
    saved = desk.ledger.load_operator_states()["solver"]
    restored = build_chain(desk.config, "solver")
    restored.load_state_dict(saved)
    assert restored.state_dict() == desk.solver.chain.state_dict()
    assert restored.metrics() == desk.solver.chain.metrics()


async def test_what_a_halted_policy_does_not_train_waits_in_the_ledger_only(open_desk: OpenDesk) -> None:
    desk = open_desk(policies={"solver": {}, "verifier": {}}, groups_per_step=9)
    desk.solver.halt("an alarm")
    group_id = await close_group(desk, 0.0, 1.0, policies=("solver", "verifier"))
    assert [len(host.buffer) for host in desk.policies.values()] == [0, 1]
    assert [group.group_id for group in desk.ledger.unconsumed("solver")] == [group_id]


@pytest.mark.parametrize(("algorithm", "equal"), [("grpo", 3), ("reinforce", 0), ("ppo", 0)])
async def test_equal_rewards_are_no_news_where_they_teach(open_desk: OpenDesk, algorithm: str, equal: int) -> None:
    desk = open_desk(policies={"solver": {"trainer": {"algorithm": algorithm}}}, groups_per_step=9)
    await close_group(desk, 1.0, 1.0)
    await close_group(desk, 1.0)
    await close_group(desk, 0.0)
    assert desk.solver.equal_groups == equal


async def test_without_operators_nothing_is_saved(open_desk: OpenDesk) -> None:
    desk = open_desk(groups_per_step=9)
    await close_group(desk, 0.0, 1.0)
    assert desk.ledger.load_operator_states() == {}


async def lose_group(desk: Any) -> None:
    """The next group that is dealt: the only attempt of each of its two members fails."""
    request = LeaseRequest(max_leases=2, splits=[Split.TRAIN], wait_s=0)
    for lease in (await desk.rollouts.lease(request)).leases:
        begin = BeginRequest(idempotency_key=lease.lease_id, lease_id=lease.lease_id)
        episode = desk.episode((await desk.rollouts.begin(begin, base_url="http://here/v1")).episode_id)
        await desk.finishing.finish(episode, FinishRequest(outcome=Outcome.ENVIRONMENT, message="no sandbox"))
    assert desk.book.counts(Split.TRAIN).num_groups == 0
    desk.check_writes()


async def test_people_are_told_when_nobody_finishes(open_desk: OpenDesk) -> None:
    desk = open_desk(groups_per_step=1, max_attempts=1)
    for _ in range(2):
        await lose_group(desk)
    assert desk.finishing.lost_groups.blocker == ""
    await lose_group(desk)
    told = desk.finishing.lost_groups.blocker
    assert "nothing of the last 3 training groups can train: none of 2 episodes finished: failed" in told
    await close_leased(desk, 0.0, 1.0)
    assert desk.finishing.lost_groups.blocker == ""


async def test_people_are_told_when_no_token_can_train(open_desk: OpenDesk) -> None:
    desk = open_desk(groups_per_step=9)
    for _ in range(3):
        await close_leased(desk, 0.0, 1.0, logprob=float("nan"))
    assert "no token of theirs can train" in desk.finishing.lost_groups.blocker
    await close_leased(desk, 1.0, 1.0)  # equal rewards are told of elsewhere
    assert desk.finishing.lost_groups.blocker == ""


async def test_what_operators_drop_is_not_told_twice(open_desk: OpenDesk) -> None:
    desk = open_desk(operators=[{"use": "zero_variance_filter"}], groups_per_step=9)
    for _ in range(5):
        await close_leased(desk, 1.0, 1.0)
    assert desk.finishing.lost_groups.blocker == ""
    assert "operators dropped every episode of the last 5 groups" in desk.solver.chain.blocker


async def test_what_a_rollback_drops_again_is_recorded_once(
    open_desk: OpenDesk, make_manifest: Callable[..., Any]
) -> None:
    desk = open_desk(dynamic_sampling=True, groups_per_step=1)
    write = desk.solver.roll_back(base_lineage=0, base_step=0, reason="a new lineage")
    await close_group(desk, 1.0, 1.0)  # equal: it leaves at once, and the ledger does not know yet
    write.result(timeout=10)
    desk.solver.refill(make_manifest(0))
    assert desk.solver.buffer.drain_dropped() == ()
    desk.check_writes()
    assert states(desk) == {("solver", "dropped"): 2}
    assert desk.solver.buffer.discards["zero_variance"].num_episodes == 2


async def test_what_leaves_while_no_batch_fills_is_recorded_all_the_same(open_course: Callable[..., Any]) -> None:
    course = open_course(dynamic_sampling=True, groups_per_step=2)
    run = asyncio.create_task(course.host.run(course.after_step))
    course.trainer().join()
    course.group("a")
    for name in "bcd":
        course.group(name, (1.0, 1.0))
    for _ in range(3):
        await asyncio.sleep(0)  # the step loop looks
    run.cancel()
    course.desk.check_writes()
    assert states(course.desk) == {("solver", "finished"): 2, ("solver", "dropped"): 6}
