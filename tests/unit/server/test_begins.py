"""Begins: repeated ones, those on trial, and what a lease says of its holder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.errors import ConflictError, EpisodeClosed, IdempotencyConflict, OverloadedError, UnavailableError
from wingbeat.core.protocol import (
    AbortRequest,
    BeginReply,
    BeginRequest,
    FinishRequest,
    GroupModel,
    LeaseRequest,
    TaskModel,
)
from wingbeat.core.types import Split
from wingbeat.dataflow.groups import SlotState
from wingbeat.server.episodes import begins
from wingbeat.server.episodes.registry import EpisodeState

OpenDesk = Callable[..., Any]
CODE = "ab" * 32


async def begin(desk: Any, key: str, **fields: Any) -> BeginReply:
    return await desk.rollouts.begin(BeginRequest(idempotency_key=key, **fields), base_url="http://here/v1")


async def lease(desk: Any, **fields: Any) -> str:
    reply = await desk.rollouts.lease(LeaseRequest(splits=[Split.TRAIN], wait_s=0, **fields))
    return reply.leases[0].lease_id


def held(desk: Any, reply: BeginReply) -> Any:
    return desk.registry.by_key({"authorization": f"Bearer {reply.api_key}"})


async def trial(desk: Any, key: str = "trial", seconds: float = 5.0) -> Any:
    return held(desk, await begin(desk, key, lease_id=await lease(desk), tentative_s=seconds))


# --- who runs it ----------------------------------------------------------------------------------


async def test_under_a_lease_the_lease_says_what_the_begin_does_not(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1)
    first = await lease(desk, client_id="cluster", code=CODE, label="v1")
    episode = held(desk, await begin(desk, "1", lease_id=first))
    assert (episode.client, episode.code, episode.label) == ("cluster", CODE, "v1")
    (attempt,) = desk.ledger.running_attempts()
    assert (attempt.begin.client, attempt.begin.code, attempt.begin.label) == ("cluster", CODE, "v1")
    own = await begin(desk, "2", task=TaskModel(id="t"), split=Split.EVAL, client_id="me", label="mine", code=CODE)
    assert (held(desk, own).client, held(desk, own).label) == ("me", "mine")


async def test_promised_heartbeats_count_from_the_begin_on(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, groups_per_step=2)
    promised = held(desk, await begin(desk, "1", lease_id=await lease(desk), heartbeats=True))
    silent = held(desk, await begin(desk, "2", lease_id=await lease(desk)))
    desk.clock.now += 4.5
    desk.rollouts.reap()
    assert (promised.state, silent.state) == (EpisodeState.LOST, EpisodeState.OPEN)


# --- repeats --------------------------------------------------------------------------------------


async def test_a_repeated_begin_gets_its_first_answer(open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begins, "REMEMBERED", 2)
    desk = open_desk()
    task: dict[str, Any] = {"task": TaskModel(id="t"), "split": Split.EVAL}
    first = await begin(desk, "k1", **task)
    assert await begin(desk, "k1", **task) == first
    with pytest.raises(IdempotencyConflict, match="'k1' was used with another body"):
        await begin(desk, "k1", label="other", **task)
    await begin(desk, "k2", **task)
    await begin(desk, "k3", **task)
    again = await begin(desk, "k1", **task)  # memory is bounded, the ledger is not
    assert (again.episode_id, again.attempt) == (first.episode_id, 1) and again.api_key != first.api_key
    desk.finishing.abort(desk.registry.current(first.episode_id), AbortRequest())
    await begin(desk, "k4", **task)
    await begin(desk, "k5", **task)
    with pytest.raises(EpisodeClosed, match="which this key began, is aborted; begin another one"):
        await begin(desk, "k1", **task)
    with pytest.raises(IdempotencyConflict):
        await begin(desk, "k1", label="other", **task)


async def test_a_tentative_begin_is_not_forgotten(open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger does not know it: a repeat would begin another attempt."""
    monkeypatch.setattr(begins, "REMEMBERED", 2)
    desk = open_desk()
    task: dict[str, Any] = {"task": TaskModel(id="t"), "split": Split.EVAL}
    trial = await begin(desk, "trial", tentative_s=5.0, **task)
    first = await begin(desk, "k0", **task)
    for number in range(1, 5):
        await begin(desk, f"k{number}", **task)
    assert await begin(desk, "trial", tentative_s=5.0, **task) == trial
    assert (await begin(desk, "k0", **task)).api_key != first.api_key, "memory is bounded"


async def test_a_begin_is_answered_once_it_is_on_disk(open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begins, "DURABLE_S", 0.0)
    desk = open_desk()
    lease_id = await lease(desk)
    with pytest.raises(UnavailableError, match="not on disk yet"):
        await begin(desk, "k1", lease_id=lease_id)
    desk.check_writes()
    reply = await begin(desk, "k1", lease_id=lease_id)
    (attempt,) = desk.ledger.running_attempts()
    assert attempt.begin.episode_id == reply.episode_id, "the repeat is the same attempt"


# --- trials ---------------------------------------------------------------------------------------


async def test_silence_counts_from_the_confirmation_on(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1)
    reply = await begin(desk, "k", lease_id=await lease(desk), tentative_s=5.0, heartbeats=True)
    desk.clock.now += 4.5
    await desk.rollouts.begins.confirm(held(desk, reply))
    desk.clock.now += 3.5
    desk.rollouts.reap()
    assert held(desk, reply).state is EpisodeState.OPEN


async def test_a_confirmed_trial_is_an_ordinary_attempt(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode = await trial(desk)
    with pytest.raises(EpisodeClosed, match=f"POST /api/episodes/{episode.episode_id}/confirm"):
        episode.require_open()
    with pytest.raises(EpisodeClosed, match="is tentative"):
        await desk.finishing.finish(episode, FinishRequest(rewards=1.0))
    assert desk.ledger.running_attempts() == () and episode in desk.registry.open_episodes()
    assert desk.registry.current(episode.episode_id) is None, "it is not the current attempt yet"
    await desk.rollouts.begins.confirm(episode)
    await desk.rollouts.begins.confirm(episode)
    episode.require_open()
    (attempt,) = desk.ledger.running_attempts()
    assert (attempt.begin.episode_id, attempt.begin.attempt) == (episode.episode_id, 1)
    desk.clock.now += 6
    desk.rollouts.reap()
    assert episode.state is EpisodeState.OPEN, "a confirmed one does not lapse"
    desk.check_writes()


@pytest.mark.parametrize("how", ["lapse", "withdraw"])
async def test_a_trial_that_ends_uses_up_nothing(open_desk: OpenDesk, how: str) -> None:
    desk = open_desk(max_attempts=1)
    for _ in range(3):  # more often than there are attempts
        episode = await trial(desk, key=f"key-{desk.clock.now}")
        if how == "lapse":
            desk.clock.now += 5.5
            desk.rollouts.reap()
        else:
            assert desk.rollouts.begins.withdraw(episode, "no room elsewhere")
            assert not desk.rollouts.begins.withdraw(episode, "again")
            desk.clock.now += 1
        assert (episode.state, desk.book.state_of(episode.episode_id)[0]) == (EpisodeState.ABORTED, SlotState.FREE)
        with pytest.raises(EpisodeClosed, match="not confirmed in time or was withdrawn"):
            await desk.rollouts.begins.confirm(episode)
    assert desk.registry.open_episodes() == []
    desk.check_writes()


async def test_a_trial_leaves_the_attempt_before_it_alone_until_it_is_confirmed(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1)
    lost = held(desk, await begin(desk, "first", lease_id=await lease(desk)))
    desk.clock.now += 101
    desk.rollouts.reap()
    assert lost.state is EpisodeState.LOST
    withdrawn = await trial(desk, "second")
    assert (withdrawn.episode_id, withdrawn.attempt) == (lost.episode_id, 2)
    desk.rollouts.begins.withdraw(withdrawn, "")
    late = await trial(desk, "third")
    await desk.finishing.finish(lost, FinishRequest(rewards=1.0))  # counts: no successor has begun
    with pytest.raises(ConflictError):
        await desk.rollouts.begins.confirm(late)
    assert (lost.state, late.state) == (EpisodeState.FINISHED, EpisodeState.ABORTED)
    desk.check_writes()


async def test_a_confirmed_trial_supersedes_the_attempt_before_it(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1)
    lost = held(desk, await begin(desk, "first", lease_id=await lease(desk)))
    desk.clock.now += 101
    desk.rollouts.reap()
    await desk.rollouts.begins.confirm(await trial(desk, "second"))
    with pytest.raises(EpisodeClosed, match="superseded"):
        await desk.finishing.finish(lost, FinishRequest(rewards=1.0))


async def test_a_trial_never_waits_for_room(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=1, max_staleness=0, server={"begin_wait_s": 30})
    await begin(desk, "1", lease_id=await lease(desk))
    task: dict[str, Any] = {"task": TaskModel(id="own"), "group": GroupModel(id="own", size=1)}
    with pytest.raises(OverloadedError):
        await begin(desk, "2", tentative_s=5, **task)
