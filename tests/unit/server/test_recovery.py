"""Attempts that outlive control: what is rebuilt, what is not, and what their clients are answered."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import AuthenticationError, EpisodeClosed, IdempotencyConflict, PermissionDenied
from wingbeat.core.protocol import (
    AbortRequest,
    BeginReply,
    BeginRequest,
    EvaluationRequest,
    FinishRequest,
    LeaseRequest,
    TaskModel,
)
from wingbeat.core.types import Cause, FinishReason, Outcome, Split
from wingbeat.dataflow.groups import SlotState
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.lineages import Ancestry, Lineage
from wingbeat.server.episodes.recovery import asked_again, find_attempt
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.tracking.messages import Message

OpenDesk = Callable[..., Any]
Restart = Callable[[Any], Any]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


async def begin(desk: Any, key: str, **fields: Any) -> BeginReply:
    return await desk.rollouts.begin(BeginRequest(idempotency_key=key, **fields), base_url="http://here/v1")


async def begun(desk: Any, key: str = "k", **fields: Any) -> tuple[BeginReply, OpenEpisode]:
    reply = await desk.rollouts.lease(LeaseRequest(splits=[Split.TRAIN], wait_s=0, client_id="me", label="v1"))
    answer = await begin(desk, key, lease_id=reply.leases[0].lease_id, heartbeats=True, **fields)
    return answer, held(desk, answer)


def held(desk: Any, reply: BeginReply) -> OpenEpisode:
    return desk.registry.by_key({"authorization": f"Bearer {reply.api_key}"})


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def plan_of(desk: Any, episode: OpenEpisode, *messages: Message, tools: Any = None) -> Any:
    return episode.graph.resolve(
        policy="solver", agent="", messages=messages, tools=tools, template=desk.solver.template
    )


def say(
    desk: Any,
    episode: OpenEpisode,
    *messages: Message,
    tools: Any = None,
    version: int = 0,
    finish: FinishReason = FinishReason.STOP,
    delivered: bool = True,
) -> str:
    """A model call with this conversation, as the gateway commits it."""
    plan = plan_of(desk, episode, *messages, tools=tools)
    asked_again(episode, plan)
    turn_id = episode.new_turn_id()
    episode.undelivered.add(turn_id)
    turn = episode.graph.commit(
        plan,
        turn_id=turn_id,
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-1.0, -2.0], np.float32),
        versions=((version, 2),),
        temperature=1.0,
        finish_reason=finish,
        reply=Message("assistant", "yes"),
    )
    if turn.tools_digest and tools:
        episode.tools_by_digest.setdefault(turn.tools_digest, tools)
    desk.capture(episode, turn)
    if delivered:
        episode.undelivered.discard(turn_id)
    return turn_id


HI = Message("user", "hi")
ANSWER = Message("assistant", "yes")
MORE = Message("user", "more")


# --- going on -------------------------------------------------------------------------------------


async def test_a_running_attempt_goes_on_where_it_was(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, before = await begun(desk)
    first = say(desk, before, HI, tools=TOOLS)
    desk = restart_desk(desk)
    after = held(desk, reply)
    assert after is not before
    assert (after.state, after.attempt, after.policies) == (EpisodeState.OPEN, 1, {"solver": None})
    assert (after.client, after.label, after.has_heartbeat) == ("me", "v1", True)
    assert (after.group, list(after.tools_by_digest.values())) == (before.group, [TOOLS])
    assert desk.book.state_of(after.episode_id) == (SlotState.RUNNING, 1)
    second = say(desk, after, HI, ANSWER, MORE, tools=TOOLS)
    assert after.graph.turn(second).parent_id == first, "what was sampled before is not tokenised again"
    assert int(second.rpartition("-")[2]) >= 1000, "no id is given twice"
    finished = await desk.finishing.finish(after, FinishRequest(rewards=0.5))
    assert (finished.num_turns, finished.num_sampled_tokens) == (2, 4)
    (view,) = desk.ledger.episode(after.episode_id)
    assert [s.num_sampled for s in view.record.samples] == [4]
    desk.check_writes()


async def test_a_second_restart_loses_nothing_either(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    say(desk, episode, HI, tools=TOOLS)
    desk = restart_desk(desk)
    say(desk, held(desk, reply), HI, ANSWER, MORE, tools=TOOLS)
    desk = restart_desk(desk)
    episode = held(desk, reply)
    assert (episode.graph.num_turns, list(episode.tools_by_digest.values())) == (2, [TOOLS])
    last = say(desk, episode, HI, ANSWER, MORE, ANSWER, MORE, tools=TOOLS)
    assert len(episode.graph.path(episode.graph.turn(last))) == 3
    assert len({turn.turn_id for turn in episode.graph.turns}) == 3


async def test_the_same_begin_after_a_restart_is_the_same_attempt_with_another_key(
    open_desk: OpenDesk, restart_desk: Restart
) -> None:
    desk = open_desk(group_size=1)
    task: dict[str, Any] = {"task": TaskModel(id="own", payload={"a": [1]}), "idle_timeout_s": 50}
    first = await begin(desk, "key", **task)
    desk = restart_desk(desk)
    again = await begin(desk, "key", **task)
    assert (again.episode_id, again.attempt) == (first.episode_id, first.attempt)
    assert again.api_key != first.api_key and held(desk, again) is held(desk, first)
    assert await begin(desk, "key", **task) == again
    with pytest.raises(IdempotencyConflict):
        await begin(desk, "key", task=TaskModel(id="other"))
    desk = restart_desk(desk)
    assert held(desk, again) is held(desk, first), "both keys stay good"
    desk.check_writes()


async def test_a_lost_attempt_may_still_finish_after_the_restart(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    say(desk, episode, HI)
    desk.clock.now += 5
    desk.rollouts.reap()
    desk.check_writes()
    desk = restart_desk(desk)
    episode = held(desk, reply)
    assert (episode.state, desk.book.state_of(episode.episode_id)) == (EpisodeState.LOST, (SlotState.FREE, 2))
    await desk.finishing.finish(episode, FinishRequest(rewards=1.0))
    assert desk.book.state_of(episode.episode_id) == (SlotState.FINISHED, 1)
    desk.check_writes()


async def test_an_episode_that_ran_through_a_rollback_is_old_also_after_a_restart(
    open_desk: OpenDesk, restart_desk: Restart
) -> None:
    desk = open_desk(group_size=2, max_staleness=9)
    reply, episode = await begun(desk)
    say(desk, episode, HI, version=7)
    desk.ledger.begin_lineage("solver", base_lineage=0, base_step=3, reason="test").result(10)
    desk = restart_desk(desk)
    assert held(desk, reply).highest_versions == {"solver": 3}
    assert desk.solver.ancestry == Ancestry(
        {1: Lineage("solver", 1, 0, 3, "test", desk.solver.ancestry.lineages[1].began_s)}
    )
    say(desk, held(desk, reply), HI, ANSWER, MORE, version=4)
    desk = restart_desk(desk)
    assert held(desk, reply).highest_versions == {"solver": 3}, "the turn of the new lineage does not lift it"


async def test_a_wall_clock_that_jumps_changes_nothing(
    open_desk: OpenDesk, restart_desk: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun a century ahead and a century ago: what is recorded of the time of day decides nothing."""
    desk = open_desk(group_size=2)
    replies: list[BeginReply] = []
    for number, wall in enumerate((4e9, 1.0)):
        monkeypatch.setattr(desk.ledger, "_clock", lambda wall=wall: wall)
        monkeypatch.setattr("wingbeat.server.episodes.begins.time.time", lambda wall=wall: wall)
        replies.append((await begun(desk, f"key-{number}"))[0])
    monkeypatch.undo()
    begun_ids = [(a.begin.episode_id, a.begin.attempt) for a in desk.ledger.running_attempts()]
    assert begun_ids == [(reply.episode_id, 1) for reply in replies]
    desk = restart_desk(desk)
    desk.clock.now += 1.0
    desk.rollouts.reap()
    for reply in replies:
        episode = held(desk, reply)
        say(desk, episode, HI)
        await desk.finishing.finish(episode, FinishRequest(rewards=1.0))
    assert desk.book.counts().num_groups == 0, "the group is complete"
    assert desk.ledger.verify() == []
    desk.check_writes()


# --- the last reply -------------------------------------------------------------------------------


async def test_a_last_reply_that_is_asked_for_again_is_replaced(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    say(desk, episode, HI)
    lost = say(desk, episode, HI, ANSWER, MORE, delivered=False)
    desk = restart_desk(desk)
    episode = held(desk, reply)
    assert episode.in_doubt == {lost}
    kept = say(desk, episode, HI, ANSWER, MORE)
    assert (episode.resampled, episode.in_doubt) == ({lost}, set())
    desk = restart_desk(desk)
    episode = held(desk, reply)
    assert (episode.resampled, episode.in_doubt) == ({lost}, {kept}), "the mark outlives the next restart"
    finished = await desk.finishing.finish(episode, FinishRequest(rewards=1.0))
    (view,) = desk.ledger.episode(episode.episode_id)
    assert finished.num_turns == 3
    assert [s.num_sampled for s in view.record.samples] == [4], "the lost reply does not train"


async def test_a_last_reply_that_nobody_asks_for_again_counts(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    say(desk, episode, HI)
    desk = restart_desk(desk)
    say(desk, held(desk, reply), Message("user", "something else"))
    await desk.finishing.finish(held(desk, reply), FinishRequest(rewards=1.0))
    (view,) = desk.ledger.episode(reply.episode_id)
    assert [s.num_sampled for s in view.record.samples] == [4]


async def test_the_same_words_at_another_place_ask_for_no_reply_again(
    open_desk: OpenDesk, restart_desk: Restart
) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    say(desk, episode, HI)
    last = say(desk, episode, HI, ANSWER, MORE)
    desk = restart_desk(desk)
    episode = held(desk, reply)
    say(desk, episode, HI, ANSWER, MORE, ANSWER, MORE)
    assert (episode.in_doubt, episode.resampled) == ({last}, set())


async def test_what_had_not_been_delivered_earlier_stays_so(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    hung_up = say(desk, episode, Message("user", "one"), delivered=False)
    cut = say(desk, episode, Message("user", "two"), finish=FinishReason.ABORT)
    vote = say(desk, episode, HI, delivered=False)  # n = 2: both are one call
    last = say(desk, episode, HI, delivered=False)
    desk = restart_desk(desk)
    assert held(desk, reply).undelivered == {hung_up, cut}
    assert held(desk, reply).in_doubt == {vote, last}


# --- who does not come back ------------------------------------------------------------------------


async def test_a_client_that_does_not_come_back_uses_up_no_attempt(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2, max_attempts=1)
    for attempt in (1, 2, 3):  # more often than there are attempts
        reply, _ = await begun(desk, f"key-{attempt}")
        desk = restart_desk(desk)
        desk.clock.now += 1.5
        desk.rollouts.reap()
        assert held(desk, reply).state is EpisodeState.OPEN, "it has two heartbeats to come back"
        desk.clock.now += 1.0
        desk.rollouts.reap()
        episode = held(desk, reply)
        assert (episode.state, episode.cause) == (EpisodeState.ABORTED, Cause.SERVER_RESTART)
        assert desk.book.state_of(reply.episode_id) == (SlotState.FREE, attempt + 1)
        desk.check_writes()
        with pytest.raises(EpisodeClosed):
            await desk.finishing.finish(episode, FinishRequest(rewards=1.0))
    states = [view.state for view in desk.ledger.episode(reply.episode_id)]
    assert states == ["interrupted"] * 3


async def test_a_client_that_came_back_is_lost_as_any_other(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, _ = await begun(desk)
    desk = restart_desk(desk)
    held(desk, reply).last_seen = desk.clock.now
    desk.clock.now += 3.5
    desk.rollouts.reap()
    assert held(desk, reply).state is EpisodeState.OPEN
    desk.clock.now += 1.0
    desk.rollouts.reap()
    assert held(desk, reply).state is EpisodeState.LOST


def captures(desk: Any) -> list[Path]:
    return sorted((desk.folder / "turns").glob("*.turns"))


async def test_damaged_turns_interrupt_their_attempt_alone(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk, "one")
    say(desk, episode, HI)
    (file,) = captures(desk)
    say(desk, episode, HI, ANSWER, MORE)
    other, another = await begun(desk, "two")
    say(desk, another, HI)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    desk = restart_desk(desk)
    assert held(desk, other).graph.num_turns == 1
    assert desk.book.state_of(reply.episode_id) == (SlotState.FREE, 2)
    (view,) = desk.ledger.episode(reply.episode_id)
    assert (view.state, view.outcome) == ("interrupted", Outcome.INFRASTRUCTURE)
    assert "its turns cannot be read" in view.message
    told = find_attempt(desk, reply.episode_id, headers(reply.api_key))
    assert (told.state, told.cause) == (EpisodeState.ABORTED, Cause.SERVER_RESTART)
    with pytest.raises(EpisodeClosed):
        told.require_open()
    assert [e["episode_id"] for e in desk.log if e["event"] == "episode_interrupted"] == [reply.episode_id]
    desk.check_writes()


async def test_a_turn_that_was_cut_off_at_the_end_is_forgotten(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    say(desk, episode, HI)
    (file,) = captures(desk)
    whole = file.stat().st_size
    say(desk, episode, HI, ANSWER, MORE)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 7)  # a kill inside the append: nobody was answered
    desk = restart_desk(desk)
    assert held(desk, reply).graph.num_turns == 1 and file.stat().st_size == whole
    say(desk, held(desk, reply), HI, ANSWER, MORE)
    desk = restart_desk(desk)
    assert held(desk, reply).graph.num_turns == 2


async def test_evaluations_end_with_the_server_and_own_eval_episodes_go_on(
    open_desk: OpenDesk, restart_desk: Restart, make_manifest: Any, join_engine: Any
) -> None:
    desk = open_desk(group_size=2)
    engine = join_engine(desk.engines)
    desk.solver.adopt(make_manifest(0))
    engine.serve(0)
    desk.evaluations.start(EvaluationRequest(source="src"))
    leased = await desk.rollouts.lease(LeaseRequest(splits=[Split.EVAL], wait_s=0))
    pinned = await begin(desk, "pinned", lease_id=leased.leases[0].lease_id)
    own = await begin(desk, "own", task=TaskModel(id="t"), split=Split.EVAL)
    desk = restart_desk(desk)
    assert held(desk, own).split is Split.EVAL
    with pytest.raises(AuthenticationError):
        held(desk, pinned)
    told = find_attempt(desk, pinned.episode_id, headers(pinned.api_key))
    assert (told.state, told.cause) == (EpisodeState.ABORTED, Cause.SERVER_RESTART)
    assert told.message == "its evaluation ended with the server"
    desk.check_writes()


# --- what has ended --------------------------------------------------------------------------------


async def test_a_finish_repeated_after_the_restart_gets_its_reply(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=2)
    reply, episode = await begun(desk)
    say(desk, episode, HI)
    first = await desk.finishing.finish(episode, FinishRequest(rewards=0.5))
    desk = restart_desk(desk)
    with pytest.raises(AuthenticationError):
        find_attempt(desk, reply.episode_id, headers("wb-ep-another"))
    with pytest.raises(AuthenticationError):
        find_attempt(desk, "another-episode", headers(reply.api_key))
    found = find_attempt(desk, reply.episode_id, headers(reply.api_key))
    assert await desk.finishing.finish(found, FinishRequest(rewards=0.5)) == first
    with pytest.raises(IdempotencyConflict):
        await desk.finishing.finish(found, FinishRequest(rewards=0.6))
    remembered = desk.registry.by_id(reply.episode_id, headers(reply.api_key))  # from now on, without the ledger
    assert (remembered.state, remembered.finish_reply) == (EpisodeState.FINISHED, found.finish_reply)
    with pytest.raises(PermissionDenied):
        find_attempt(desk, "another-episode", headers(reply.api_key))
    assert find_attempt(desk, reply.episode_id, {}).state is EpisodeState.FINISHED, "an admin's question"


async def test_the_finish_of_a_later_attempt_is_repeated_as_its_own(open_desk: OpenDesk, restart_desk: Restart) -> None:
    desk = open_desk(group_size=1)
    _, first = await begun(desk, "one")
    desk.finishing.abort(first, AbortRequest())
    reply, second = await begun(desk, "two")
    assert (second.episode_id, second.attempt) == (first.episode_id, 2)
    say(desk, second, HI)
    answer = await desk.finishing.finish(second, FinishRequest(rewards=0.5))
    desk = restart_desk(desk)
    found = find_attempt(desk, reply.episode_id, headers(reply.api_key))
    assert (found.attempt, found.state) == (2, EpisodeState.FINISHED)
    assert await desk.finishing.finish(found, FinishRequest(rewards=0.5)) == answer


async def test_a_key_of_an_earlier_attempt_never_reaches_its_successor(
    open_desk: OpenDesk, restart_desk: Restart
) -> None:
    desk = open_desk(group_size=1)
    old, _ = await begun(desk, "one")
    desk.clock.now += 5
    desk.rollouts.reap()
    new, _ = await begun(desk, "two")
    assert (new.episode_id, new.attempt) == (old.episode_id, 2)
    desk.check_writes()
    desk = restart_desk(desk)
    found = find_attempt(desk, old.episode_id, headers(old.api_key))
    assert (found.attempt, found.state) == (1, EpisodeState.SUPERSEDED)
    with pytest.raises(EpisodeClosed):
        await desk.finishing.finish(found, FinishRequest(rewards=1.0))
    assert find_attempt(desk, new.episode_id, headers(new.api_key)).state is EpisodeState.OPEN


# --- what is on disk --------------------------------------------------------------------------------


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_damage_anywhere_is_noticed_or_was_never_answered(data: st.DataObject) -> None:
    """Never other turns than were captured: those, the first of them, or a refusal."""
    turns = data.draw(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        captures = Captures(Path(folder))
        for turn in turns:
            captures.append("e", 1, turn)
        (file,) = Path(folder).iterdir()
        damaged = bytearray(file.read_bytes())
        if data.draw(st.booleans()):
            del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
        else:
            place = data.draw(st.integers(0, len(damaged) - 1))
            damaged[place] ^= data.draw(st.integers(1, 255))
        file.write_bytes(damaged)
        try:
            found = list(captures.recover("e", 1))
        except ValueError:
            return
        assert found == turns[: len(found)]
        captures.append("e", 1, b"after")
        assert list(captures.read("e", 1)) == [*found, b"after"], "what comes next can be read"
