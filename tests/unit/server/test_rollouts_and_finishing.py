"""From lease to buffer: what begins, what counts, what reopens; real book, ledger and registry, no network."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from wingbeat.core.config.server import ServerConfig
from wingbeat.core.errors import (
    ConflictError,
    EpisodeClosed,
    IdempotencyConflict,
    InvalidReward,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownPolicy,
    VersionGone,
)
from wingbeat.core.protocol import (
    AbortRequest,
    BeginReply,
    BeginRequest,
    EvaluationRequest,
    FinishRequest,
    GroupModel,
    Lease,
    LeaseRequest,
    Rewards,
    TaskModel,
)
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.groups import SlotState
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.server.status import NO_TASKS

OpenDesk = Callable[..., Any]


async def leases(desk: Any, count: int = 1, splits: tuple[Split, ...] = (Split.TRAIN,)) -> list[Lease]:
    request = LeaseRequest(max_leases=count, splits=list(splits), wait_s=0)
    return (await desk.rollouts.lease(request)).leases


async def begin(desk: Any, key: str = "", **fields: Any) -> BeginReply:
    request = BeginRequest(idempotency_key=key or f"key-{len(desk.writes)}", **fields)
    return await desk.rollouts.begin(request, base_url="http://here/v1")


async def begun(desk: Any, count: int = 1) -> list[OpenEpisode]:
    """Leased and begun training episodes, each with one turn."""
    found: list[OpenEpisode] = []
    for lease in await leases(desk, count):
        reply = await begin(desk, key=lease.lease_id, lease_id=lease.lease_id)
        episode = desk.episode(reply.episode_id)
        desk.take_turn(episode)
        found.append(episode)
    return found


def finish(reward: float = 1.0, outcome: Outcome = Outcome.AGENT) -> FinishRequest:
    return FinishRequest(outcome=outcome, rewards=reward)


# --- rollbacks and a full disk -------------------------------------------------------------------


async def test_an_episode_that_ran_through_a_rollback_is_not_newer_than_what_survives(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=2)
    episode, later = await begun(desk, 2)
    desk.take_turn(episode, version=5)
    desk.take_turn(later, version=1)
    desk.registry.rebase("solver", highest=2)
    desk.registry.rebase("solver", highest=3)  # a later rollback to a later step changes nothing for it
    await desk.finishing.finish(episode, finish())
    await desk.finishing.finish(later, finish())
    versions = [
        {int(v) for part in samples.samples for v in part.versions_T if v >= 0}
        for attempt in (episode, later)
        for samples in desk.ledger.episode(attempt.episode_id)[0].record.samples
    ]
    assert versions == [{0, 2}, {0, 1}]
    desk.check_writes()


async def test_on_a_full_disk_no_training_group_is_admitted(
    open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk()
    monkeypatch.setattr(type(desk.ledger), "blocked", property(lambda self: "the disk is full"))
    assert not desk.solver.admits_group() and await leases(desk, 1) == []
    monkeypatch.undo()
    assert desk.solver.admits_group() and len(await leases(desk, 1)) == 1


# --- begin -------------------------------------------------------------------------------------


async def test_leases_fill_a_group_before_the_next_and_begin_once_each(open_desk: OpenDesk) -> None:
    desk = open_desk(groups_per_step=2, group_size=2)
    three = await leases(desk, 3)
    assert three[0].group == three[1].group and three[1].group != three[2].group
    reply = await begin(desk, lease_id=three[0].lease_id)
    assert (reply.attempt, reply.base_url, reply.policies) == (1, "http://here/v1", ["solver"])
    assert desk.registry.by_key({"x-api-key": reply.api_key}).episode_id == reply.episode_id
    with pytest.raises(NotFoundError, match="lapsed or was used"):
        await begin(desk, lease_id=three[0].lease_id)
    desk.check_writes()


async def test_the_same_begin_gets_the_same_episode(open_desk: OpenDesk) -> None:
    desk = open_desk()
    (lease,) = await leases(desk)
    first = await begin(desk, "one", lease_id=lease.lease_id)
    assert await begin(desk, "one", lease_id=lease.lease_id) == first
    with pytest.raises(IdempotencyConflict):
        await begin(desk, "one", lease_id=lease.lease_id, label="other")


async def test_a_begin_repeated_while_the_first_waits_begins_one_episode(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, max_staleness=0)
    server = desk.config.server.model_copy(update={"begin_wait_s": 30.0})
    object.__setattr__(desk.rollouts._parts, "config", desk.config.model_copy(update={"server": server}))
    (blocker,) = await begun(desk)
    task = TaskModel(id="mine")
    waiting = [asyncio.create_task(begin(desk, "same", task=task)) for _ in range(2)]
    await asyncio.sleep(0)
    desk.finishing.abort(blocker, AbortRequest())
    for _ in range(2):  # the aborted slot reopens: use it up, so that its group closes and makes room
        (again,) = await begun(desk)
        desk.finishing.abort(again, AbortRequest())
    first, second = await asyncio.gather(*waiting)
    assert first == second
    assert len(desk.registry.open_episodes()) == 1


async def test_without_room_a_begin_is_told_what_blocks(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, max_staleness=0)
    await begun(desk)
    with pytest.raises(OverloadedError, match="a blocker"):
        await begin(desk, task=TaskModel(id="mine"))
    assert not await leases(desk)


async def test_a_refused_begin_that_brings_its_task_is_not_told_to_bring_tasks(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, max_staleness=0)
    await begun(desk)
    object.__setattr__(desk.rollouts._parts, "blockers", lambda: [NO_TASKS, "another"])
    with pytest.raises(OverloadedError) as caught:
        await begin(desk, task=TaskModel(id="mine"))
    assert caught.value.message == "no room for another episode now: another"
    desk.complete = True
    with pytest.raises(OverloadedError, match="the run is complete"):
        await begin(desk, task=TaskModel(id="mine"))


async def test_a_training_episode_of_frozen_policies_is_refused_at_once(open_desk: OpenDesk) -> None:
    desk = open_desk(policies=TEAM)
    with pytest.raises(RequestError, match="got only frozen ones: judge"):
        await begin(desk, task=TaskModel(id="mine"), policies=["judge"])
    assert (await begin(desk, task=TaskModel(id="mine"), policies=["judge"], split=Split.EVAL)).policies == ["judge"]


TEAM: dict[str, Any] = {"judge": {"trainable": False}, "writer": {}, "editor": {}}


async def test_the_first_policy_of_an_episode_trains_else_the_configs_order_holds(
    open_desk: OpenDesk, make_manifest: Any
) -> None:
    desk = open_desk(policies=TEAM)
    (lease,) = await leases(desk)
    dealt = await begin(desk, lease_id=lease.lease_id)
    assert dealt.policies == list(desk.episode(dealt.episode_id).policies) == ["writer", "editor", "judge"]
    named = await begin(desk, task=TaskModel(id="mine"), policies=["judge", "editor", "writer"])
    assert named.policies == ["editor", "writer", "judge"]
    for host in desk.policies.values():
        host.adopt(make_manifest(0, policy=host.name))
    desk.evaluations.start(EvaluationRequest(policy="editor"))
    (lease,) = await leases(desk, splits=(Split.EVAL,))
    scored = await begin(desk, lease_id=lease.lease_id)
    assert scored.policies == dealt.policies, "an agent plays the same part as in training"


@pytest.mark.parametrize(
    ("policies", "split", "error"),
    [
        (["nobody"], Split.TRAIN, UnknownPolicy),
        (["solver@0"], Split.TRAIN, RequestError),
        (["solver@x"], Split.EVAL, RequestError),
        (["solver@7"], Split.EVAL, VersionGone),
    ],
)
async def test_policies_are_checked_before_anything_begins(
    open_desk: OpenDesk, policies: list[str], split: Split, error: type[Exception]
) -> None:
    desk = open_desk()
    with pytest.raises(error):
        await begin(desk, task=TaskModel(id="mine"), policies=policies, split=split)
    assert desk.book.counts().num_groups == 0 and not desk.writes


async def test_members_of_a_declared_group_meet_and_it_is_not_leased_to_others(open_desk: OpenDesk) -> None:
    desk = open_desk(groups_per_step=4)
    group, task = GroupModel(id="mine", size=2), TaskModel(id="t")
    first = await begin(desk, task=task, group=group)
    assert first.group.id not in {lease.group.id for lease in await leases(desk, 2)}
    for changed in ({"group": GroupModel(id="mine", size=3)}, {"task": TaskModel(id="u")}, {"split": Split.EVAL}):
        with pytest.raises(ConflictError, match="was opened with size 2"):
            await begin(desk, **{"task": task, "group": group, **changed})
    second = await begin(desk, task=task, group=group)
    assert second.group == first.group and second.episode_id != first.episode_id
    with pytest.raises(OverloadedError, match="group 'mine' has its 2 members"):
        await begin(desk, task=task, group=group)
    for reply in (first, second):
        await desk.finishing.finish(desk.episode(reply.episode_id), finish())
    with pytest.raises(ConflictError, match="has closed"):
        await begin(desk, task=task, group=group)


async def test_a_strangers_lease_never_gets_a_clients_own_task(open_desk: OpenDesk) -> None:
    desk = open_desk(groups_per_step=8)
    await begin(desk, task=TaskModel(id="mine"), group=GroupModel(id="mine", size=2))
    for lease in await leases(desk, 8):
        assert lease.task.id != "mine"


async def test_a_group_whose_client_never_came_back_gives_its_room_back(open_desk: OpenDesk) -> None:
    desk = open_desk(group_deadline_s=50.0)
    reply = await begin(desk, task=TaskModel(id="mine"), group=GroupModel(id="mine", size=2))
    desk.take_turn(desk.episode(reply.episode_id))
    await desk.finishing.finish(desk.episode(reply.episode_id), finish())
    desk.clock.now += 49
    desk.rollouts.reap()
    desk.finishing.settle()
    assert desk.book.counts().num_groups == 1, "its client may still come"
    desk.clock.now += 2
    desk.rollouts.reap()
    desk.finishing.settle()
    assert desk.book.counts().num_groups == 0
    assert len(desk.policies["solver"].buffer) == 1, "what it finished still counts"
    with pytest.raises(ConflictError, match="has closed"):
        await begin(desk, task=TaskModel(id="mine"), group=GroupModel(id="mine", size=2))


# --- finish ------------------------------------------------------------------------------------


async def test_a_finish_is_durable_and_the_same_again_gets_the_same_answer(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    reply = await desk.finishing.finish(episode, finish())
    assert (reply.state, reply.num_turns, reply.num_sampled_tokens) == ("finished", 1, 2)
    record = desk.ledger.episode(episode.episode_id)[0].record
    assert record is not None and record.num_turns == 1
    assert await desk.finishing.finish(episode, finish()) == reply
    with pytest.raises(IdempotencyConflict):
        await desk.finishing.finish(episode, finish(0.5))
    with pytest.raises(EpisodeClosed):
        desk.finishing.abort(episode, AbortRequest())
    assert desk.finishing.rewards_seen == {"solver": [1.0]}
    desk.check_writes()


async def test_finishes_of_one_moment_count_once(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    replies = await asyncio.gather(*(desk.finishing.finish(episode, finish()) for _ in range(3)))
    assert replies[0] == replies[1] == replies[2]
    assert desk.finishing.num_finished_train == 1


async def test_a_caller_that_hangs_up_does_not_undo_its_finish(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    call = asyncio.create_task(desk.finishing.finish(episode, finish()))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert (await desk.finishing.finish(episode, finish())).state == "finished"


async def test_a_bad_reward_changes_nothing(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    with pytest.raises(InvalidReward):
        await desk.finishing.finish(episode, FinishRequest(rewards=Rewards(policies={"nobody": 1.0})))
    assert episode.state is EpisodeState.OPEN
    assert (await desk.finishing.finish(episode, finish())).state == "finished"


async def test_a_group_that_closes_feeds_the_buffer_with_every_agents_reward(open_desk: OpenDesk) -> None:
    desk = open_desk()
    first, second = await begun(desk, 2)
    turn_id = desk.take_turn(first, agent="critic")
    rewards = Rewards(policies={"solver": 1.0}, agents={"solver:critic": 0.25}, turns={turn_id: 0.5})
    await desk.finishing.finish(first, FinishRequest(rewards=rewards))
    assert len(desk.solver.buffer) == 0
    await desk.finishing.finish(second, finish(0.0))
    draft = desk.solver.buffer.take(0)
    assert draft is not None
    found = {(e.episode_id, e.agent): e.reward for e in draft.episodes}
    assert found == {
        (first.episode_id, ""): 1.0,
        (first.episode_id, "critic"): 0.75,
        (second.episode_id, ""): 0.0,
    }
    assert desk.book.counts().num_groups == 0
    desk.check_writes()
    assert desk.ledger.summary().groups == {"closed": 1}


@pytest.mark.parametrize("keeps", [False, True])
async def test_superseded_replies_are_counted_and_trained_only_by_config(open_desk: OpenDesk, keeps: bool) -> None:
    desk = open_desk(policies={"solver": {"train_superseded": keeps}}, group_size=1)
    (episode,) = await begun(desk)
    episode.undelivered.add(desk.take_turn(episode, agent="lost"))
    episode.resampled.add(desk.take_turn(episode, agent="again"))
    episode.undelivered.add("a turn that never ended")
    await desk.finishing.finish(episode, finish())
    draft = desk.solver.buffer.take(0)
    assert draft is not None
    assert {e.agent for e in draft.episodes} == ({"", "lost", "again"} if keeps else {""})
    told = desk.metrics.render().decode()
    for reason in ("undelivered", "resampled"):
        line = f'wingbeat_untrainable_tokens_total{{policy="solver",reason="superseded: {reason}"}} 2.0'
        assert (line in told) is not keeps


async def test_a_finish_that_is_refused_counts_no_tokens(open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = open_desk(group_size=1)
    (episode,) = await begun(desk)
    episode.undelivered.add(desk.take_turn(episode, agent="lost"))

    def refuse(*_: object) -> None:
        raise EpisodeClosed("its group has closed")

    monkeypatch.setattr(desk.book, "finish", refuse)
    for _ in range(2):
        with pytest.raises(EpisodeClosed):
            await desk.finishing.finish(episode, finish())
    assert "wingbeat_untrainable_tokens_total{" not in desk.metrics.render().decode()


async def test_a_finish_without_a_trainable_turn_is_warned_of_and_reaches_no_baseline(open_desk: OpenDesk) -> None:
    desk = open_desk(policies={"judge": {"trainable": False}, "solver": {}}, group_size=3)
    replies = [await begin(desk, lease_id=lease.lease_id) for lease in await leases(desk, 3)]
    silent, judged, played = (desk.episode(reply.episode_id) for reply in replies)
    desk.take_turn(judged, policy="judge")
    desk.take_turn(played)
    ends = [await desk.finishing.finish(e, finish(1.0 if e is played else 0.0)) for e in (silent, judged, played)]
    end = ": its reward trains nothing and counts in no baseline; the model that trains is 'solver'"
    assert [reply.warning for reply in ends] == [
        "this training episode made no model call" + end,
        "this training episode called no trainable policy, only 'judge'" + end,
        "",
    ]
    draft = desk.solver.buffer._groups
    assert [m.episode_id for group in draft for m in group.members] == [played.episode_id]
    assert b"wingbeat_untrained_episodes_total 2.0" in desk.metrics.render()
    assert desk.finishing.untrained.in_a_row == 0


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.AGENT])
async def test_a_failed_outcome_reopens_the_slot_and_never_reaches_a_baseline(
    open_desk: OpenDesk, outcome: Outcome
) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    assert (await desk.finishing.finish(episode, finish(0.0, outcome))).state == "finished"
    assert desk.book.state_of(episode.episode_id) == (SlotState.FREE, 2)
    (lease,) = await leases(desk)
    reply = await begin(desk, lease_id=lease.lease_id)
    assert (reply.episode_id, reply.attempt) == (episode.episode_id, 2)
    assert desk.finishing.rewards_seen == {}
    desk.check_writes()


async def test_a_group_whose_attempts_are_used_up_is_dropped_by_name(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, max_attempts=2)
    for _ in range(2):
        (episode,) = await begun(desk)
        desk.finishing.abort(episode, AbortRequest())
    dropped = [e for e in desk.log if e["event"] == "group_dropped"]
    assert len(dropped) == 1 and "aborted" in dropped[0]["reason"]
    assert len(desk.solver.buffer) == 0
    desk.check_writes()


# --- abort -------------------------------------------------------------------------------------


async def test_an_abort_reopens_the_slot_and_may_be_repeated(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    call = asyncio.create_task(asyncio.Event().wait())
    episode.calls.add(call)  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        desk.finishing.abort(episode, AbortRequest(outcome=Outcome.ENVIRONMENT, message="x" * 5000))
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    assert desk.book.state_of(episode.episode_id) == (SlotState.FREE, 2)
    assert episode.outcome is Outcome.ENVIRONMENT and episode.num_sampled == 0
    (event,) = [e for e in desk.log if e["event"] == "episode_aborted"]
    assert len(event["message"]) == 2000
    with pytest.raises(EpisodeClosed):
        await desk.finishing.finish(episode, finish())
    desk.check_writes()


async def test_an_abort_cannot_claim_that_the_episode_ran_to_its_end(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    with pytest.raises(RequestError, match="outcome"):
        desk.finishing.abort(episode, AbortRequest(outcome=Outcome.AGENT))
    assert episode.state is EpisodeState.OPEN
    assert (await desk.finishing.finish(episode, finish())).state == "finished"


# --- loss --------------------------------------------------------------------------------------


async def lose(desk: Any) -> None:
    desk.clock.now += 101.0
    desk.rollouts.reap()


async def test_a_lost_episode_may_still_finish_late(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, other = await begun(desk, 2)
    await desk.finishing.finish(other, finish(0.0))
    await lose(desk)
    assert episode.state is EpisodeState.LOST
    assert (await desk.finishing.finish(episode, finish())).state == "finished"
    assert len(desk.solver.buffer) == 1
    desk.check_writes()


async def test_a_late_finish_after_a_successor_began_is_refused_and_counted(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, other = await begun(desk, 2)
    await desk.finishing.finish(other, finish(0.0))
    await lose(desk)
    (successor,) = await begun(desk)
    assert (successor.episode_id, successor.attempt) == (episode.episode_id, 2)
    with pytest.raises(EpisodeClosed, match="superseded"):
        await desk.finishing.finish(episode, finish())
    assert b"wingbeat_late_finishes_total 1.0" in desk.metrics.render()
    await desk.finishing.finish(successor, finish())
    assert len(desk.solver.buffer) == 1
    desk.check_writes()


async def test_a_lost_episode_may_be_aborted_without_harm_to_the_ledger(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, _ = await begun(desk, 2)
    desk.clock.now += 101.0
    desk.rollouts.reap()
    desk.finishing.abort(episode, AbortRequest())
    assert episode.state is EpisodeState.ABORTED
    desk.check_writes()


async def test_a_lease_whose_slot_a_late_finish_took_lapses_in_peace(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode, other = await begun(desk, 2)
    await lose(desk)
    (first, second) = await leases(desk, 2)
    await desk.finishing.finish(episode, finish())
    with pytest.raises(ConflictError):
        await begin(desk, lease_id=first.lease_id)
    await desk.finishing.finish(other, finish(0.0))
    desk.clock.now += ServerConfig().lease_s + 1
    desk.rollouts.reap()
    with pytest.raises(NotFoundError):
        await begin(desk, lease_id=second.lease_id)


async def test_a_lapsed_lease_gives_its_slot_back_without_using_up_an_attempt(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, max_attempts=1)
    (lease,) = await leases(desk)
    for _ in range(3):
        desk.clock.now += ServerConfig().lease_s + 1
        desk.rollouts.reap()
        (again,) = await leases(desk)
        assert again.group == lease.group
    reply = await begin(desk, lease_id=again.lease_id)
    assert reply.attempt > 1


async def test_a_group_at_its_deadline_ends_its_stragglers_and_forgets_the_lost(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=3, group_floor=1, group_deadline_s=50.0)
    done, running, lost = await begun(desk, 3)
    running.idle_timeout_s, lost.idle_timeout_s = 1000.0, 10.0
    await desk.finishing.finish(done, finish())
    await lose(desk)
    assert (running.state, lost.state) == (EpisodeState.OPEN, EpisodeState.LOST)
    desk.finishing.settle()
    assert running.state is EpisodeState.ABORTED and running.outcome is Outcome.TIMEOUT
    assert lost.state is EpisodeState.ABORTED and lost.num_sampled == 0  # its tokens are let go
    for episode in (running, lost):
        with pytest.raises(EpisodeClosed):
            await desk.finishing.finish(episode, finish())
    assert len(desk.solver.buffer) == 1
    desk.check_writes()
    states = {e.episode_id: desk.ledger.episode(e.episode_id)[-1].state for e in (running, lost)}
    assert states == {running.episode_id: "aborted", lost.episode_id: "lost"}


async def test_an_episode_that_was_lost_for_good_lets_its_tokens_go(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, max_attempts=1)
    (episode,) = await begun(desk)
    await lose(desk)
    desk.finishing.settle()
    assert episode.state is EpisodeState.ABORTED and episode.num_sampled == 0
    desk.check_writes()


# --- evaluation --------------------------------------------------------------------------------


async def test_an_evaluation_pins_its_version_and_never_feeds_the_buffer(
    open_desk: OpenDesk, make_manifest: Any
) -> None:
    desk = open_desk()
    with pytest.raises(Exception, match="no weights yet"):
        desk.evaluations.start(EvaluationRequest())
    desk.solver.adopt(make_manifest(0))
    name = desk.evaluations.start(EvaluationRequest(name="before"))
    assert desk.solver.is_pinned(0)
    found = await leases(desk, 5, (Split.EVAL, Split.TRAIN))
    assert [lease.split for lease in found[:3]] == [Split.EVAL, Split.EVAL, Split.TRAIN]  # evaluations first
    for reward, lease in enumerate(found[:2]):
        assert lease.policies == ["solver@0"]
        reply = await begin(desk, key=lease.lease_id, lease_id=lease.lease_id)
        assert desk.episode(reply.episode_id).policies == {"solver": 0}
        await desk.finishing.finish(desk.episode(reply.episode_id), finish(float(reward)))
    result = desk.evaluations.reply(name)
    assert (result.state, result.mean_reward, result.num_finished) == ("done", 0.5, 2)
    assert not desk.solver.is_pinned(0) and len(desk.solver.buffer) == 0
    assert desk.finishing.rewards_seen == {}
    with pytest.raises(NotFoundError):
        desk.evaluations.reply("unknown")
    desk.check_writes()
    assert [e.mean for e in desk.ledger.evaluations()] == [0.5]


async def test_a_slot_is_not_lost_where_its_pinned_version_is_gone(open_desk: OpenDesk, make_manifest: Any) -> None:
    desk = open_desk()
    desk.solver.adopt(make_manifest(0))
    desk.solver.pin(0)
    fields: dict[str, Any] = {
        "task": TaskModel(id="t"),
        "group": GroupModel(id="mine", size=2),
        "split": Split.EVAL,
        "policies": ["solver@0"],
    }
    await begin(desk, **fields)
    desk.solver.unpin(0)
    with pytest.raises(VersionGone):
        await begin(desk, **{**fields, "policies": None})
    counts = desk.book.counts(Split.EVAL).slots
    assert (counts[SlotState.RUNNING], counts[SlotState.FREE]) == (1, 1)


async def test_a_finish_that_the_disk_does_not_take_may_be_sent_again(
    open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control ends then, and the attempt still runs in its successor: its client must not give up."""
    desk = open_desk(group_size=1)
    (episode,) = await begun(desk)
    broken: Future[bool] = Future()
    broken.set_exception(sqlite3.OperationalError("disk I/O error"))
    monkeypatch.setattr(desk.ledger, "record_finish", lambda record: broken)
    with pytest.raises(UnavailableError, match=r"the ledger failed \(disk I/O error\).*send this again") as caught:
        await desk.finishing.finish(episode, FinishRequest(rewards=1.0))
    assert caught.value.retryable
    desk.writes.clear()
