"""Finishes that wait for a transaction: real book, ledger, registry and finishing, no network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from wingbeat.core.errors import (
    ConflictError,
    EpisodeClosed,
    IdempotencyConflict,
    NotFoundError,
    OverloadedError,
    RequestError,
)
from wingbeat.core.protocol import (
    AbortRequest,
    BeginReply,
    BeginRequest,
    FinishRequest,
    LeaseRequest,
    TaskModel,
    TransactionModel,
)
from wingbeat.core.types import Cause, Outcome, Split
from wingbeat.dataflow.groups import SlotState
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.server.teams.transactions import FIRST_ASK_S, TransactionState

OpenDesk = Callable[..., Any]
Restart = Callable[[Any], Any]
T1, T2 = "t" * 22, "u" * 22
WEST = "https://west.example:8321"


async def begun(desk: Any, *, version: int = 0, evaluates: bool = False) -> OpenEpisode:
    if evaluates:
        request = BeginRequest(idempotency_key="eval", task=TaskModel(id="1"), split=Split.EVAL)
    else:
        leases = (await desk.rollouts.lease(LeaseRequest(splits=[Split.TRAIN], wait_s=0))).leases
        request = BeginRequest(idempotency_key=leases[0].lease_id, lease_id=leases[0].lease_id)
    reply: BeginReply = await desk.rollouts.begin(request, base_url="http://here/v1")
    episode = desk.registry.by_key({"authorization": f"Bearer {reply.api_key}"})
    desk.take_turn(episode, version=version)
    return episode


def finish(transaction: str = T1, reward: float = 1.0, decider: str = "", **more: Any) -> FinishRequest:
    return FinishRequest(rewards=reward, transaction=TransactionModel(id=transaction, decider=decider), **more)


def slot(desk: Any, episode: OpenEpisode) -> tuple[SlotState, int]:
    return desk.book.state_of(episode.episode_id)


def attempt(desk: Any, episode: OpenEpisode) -> Any:
    return next(a for a in desk.ledger.episode(episode.episode_id) if a.attempt == episode.attempt)


async def pair(desk: Any) -> tuple[OpenEpisode, OpenEpisode]:
    return await begun(desk), await begun(desk)


async def test_a_prepared_finish_counts_once_its_transaction_commits(open_desk: OpenDesk) -> None:
    desk = open_desk(group_floor=1, group_deadline_s=10)
    episode, other = await pair(desk)
    await desk.finishing.finish(other, FinishRequest(rewards=0.0))
    reply = await desk.teams.prepare(episode, finish())
    assert (reply.state, reply.num_sampled_tokens) == ("prepared", 2)
    assert (await desk.teams.prepare(episode, finish())).state == "prepared"
    desk.clock.now += 1000  # past the group's deadline, and long silent
    desk.rollouts.reap()
    desk.finishing.settle()
    assert slot(desk, episode)[0] is SlotState.PREPARED and len(desk.solver.buffer) == 0
    assert attempt(desk, episode).state is AttemptState.PREPARED

    settled = await desk.teams.decide(T1, commit=True)
    assert settled.state == "committed"
    assert (await desk.teams.decide(T1, commit=True)).state == "committed"
    assert (await desk.teams.look(T1)).state == "committed"
    assert len(desk.solver.buffer) == 1 and desk.finishing.num_finished_train == 2
    assert (await desk.teams.prepare(episode, finish())).state == "finished"
    assert attempt(desk, episode).state is AttemptState.FINISHED
    assert [line["event"] for line in desk.log].count("transaction_committed") == 1
    with pytest.raises(ConflictError, match="is committed here, and stays so: abort is not possible"):
        await desk.teams.decide(T1, commit=False)
    desk.check_writes()


async def test_an_aborted_one_reopens_its_slot_and_is_never_trained(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish())
    await desk.teams.decide(T1, commit=False)
    assert slot(desk, episode) == (SlotState.FREE, 2)
    assert (episode.state, episode.outcome, episode.cause) == (
        EpisodeState.ABORTED,
        Outcome.CLIENT,
        Cause.TRANSACTION_ABORTED,
    )
    kept = attempt(desk, episode)
    assert (kept.state, kept.outcome, kept.cause) == (AttemptState.ABORTED, Outcome.CLIENT, "transaction_aborted")
    with pytest.raises(EpisodeClosed, match="aborted; its finish cannot count"):
        await desk.teams.prepare(episode, finish())
    with pytest.raises(ConflictError, match="aborted here, and stays so: commit"):
        await desk.teams.decide(T1, commit=True)
    again = await begun(desk)
    assert (again.episode_id, again.attempt) == (episode.episode_id, 2)
    desk.check_writes()


async def test_one_server_holds_several_episodes_of_a_transaction(open_desk: OpenDesk) -> None:
    desk = open_desk()
    first, second = await pair(desk)
    await desk.teams.prepare(first, finish(reward=1.0))
    await desk.teams.prepare(second, finish(reward=0.0))
    (waiting,) = desk.teams.in_doubt()
    assert set(waiting.episodes) == {first.episode_id, second.episode_id}
    await desk.teams.decide(T1, commit=True)
    assert len(desk.solver.buffer) == 1 and desk.teams.in_doubt() == []
    desk.check_writes()


async def test_what_cannot_be_prepared_changes_nothing(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode = await begun(desk)
    await desk.teams.decide(T2, commit=False)
    with pytest.raises(ConflictError, match="aborted here, and stays so: prepare"):
        await desk.teams.prepare(episode, finish(T2))
    with pytest.raises(RequestError, match="with outcome timeout trains nothing and needs no transaction"):
        await desk.teams.prepare(episode, finish(outcome=Outcome.TIMEOUT))
    with pytest.raises(RequestError, match=r"`transaction.decider`: expected the address of a server"):
        await desk.teams.prepare(episode, finish(decider="file:///etc/passwd"))
    with pytest.raises(NotFoundError, match="no episode of this server is prepared under it"):
        await desk.teams.decide(T1, commit=True)
    assert episode.state is EpisodeState.OPEN and slot(desk, episode)[0] is SlotState.RUNNING
    await desk.teams.prepare(episode, finish(decider=WEST))
    with pytest.raises(IdempotencyConflict, match="finished with another body"):
        await desk.teams.prepare(episode, finish(decider=WEST, reward=2.0))
    with pytest.raises(RequestError, match="got another `decider`"):
        await desk.teams.prepare(await begun(desk), finish())
    desk.check_writes()


async def test_a_prepared_attempt_ends_only_by_its_transaction(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish())
    with pytest.raises(EpisodeClosed, match="its transaction decides"):
        desk.finishing.abort(episode, AbortRequest())
    with pytest.raises(IdempotencyConflict):
        await desk.finishing.finish(episode, FinishRequest(rewards=1.0))
    with pytest.raises(EpisodeClosed):
        episode.require_open()
    assert slot(desk, episode)[0] is SlotState.PREPARED


async def test_evaluations_take_no_part(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode = await begun(desk, evaluates=True)
    with pytest.raises(RequestError, match="of an evaluation trains nothing"):
        await desk.teams.prepare(episode, finish())


async def test_a_lost_attempt_may_be_prepared_until_its_successor_begins(open_desk: OpenDesk) -> None:
    desk = open_desk()
    lost = await begun(desk)
    desk.clock.now += 1000
    desk.rollouts.reap()
    assert slot(desk, lost) == (SlotState.FREE, 2)
    await desk.teams.prepare(lost, finish())
    assert (await desk.rollouts.lease(LeaseRequest(max_leases=9, splits=[Split.TRAIN], wait_s=0))).leases[
        0
    ].group.id == lost.group.id  # the other slot
    await desk.teams.decide(T1, commit=False)
    state, following = slot(desk, lost)
    assert state is SlotState.FREE and following == 3  # 2 may have been leased when it came
    desk.clock.now += 1000
    desk.rollouts.reap()
    successor = await begun(desk)
    assert successor.episode_id == lost.episode_id
    second = await begun(desk)
    desk.clock.now += 1000
    desk.rollouts.reap()
    third = await begun(desk)  # in the place of one of both, whose prepare is then refused
    superseded = successor if third.episode_id == successor.episode_id else second
    with pytest.raises((EpisodeClosed, ConflictError)):
        await desk.teams.prepare(superseded, finish(T2))
    desk.check_writes()


# --- doubt ---------------------------------------------------------------------------------------


async def settled_by_itself(desk: Any, state: EpisodeState, episode: OpenEpisode) -> None:
    desk.teams.reap()
    for _ in range(200):
        if episode.state is state:
            return
        await asyncio.sleep(0.005)
    assert episode.state is state


async def test_the_decider_aborts_when_nobody_decides_in_time(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"transaction_timeout_s": 50})
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish())
    desk.clock.now += 49
    desk.teams.reap()
    assert episode.state is EpisodeState.PREPARED
    assert "it is aborted here after server.transaction_timeout_s = 50" in desk.teams.warnings()[0]
    desk.clock.now += 1
    await settled_by_itself(desk, EpisodeState.ABORTED, episode)
    assert desk.teams.warnings() == [] and desk.asked == []


@pytest.mark.parametrize(
    ("says", "ends"),
    [(TransactionState.COMMITTED, EpisodeState.FINISHED), (TransactionState.ABORTED, EpisodeState.ABORTED)],
)
async def test_a_peer_is_asked_how_it_decided(open_desk: OpenDesk, says: TransactionState, ends: EpisodeState) -> None:
    desk = open_desk(server={"peers": ["https://WEST.example:8321/"]})
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish(decider=f"{WEST}/"))
    desk.teams.reap()
    assert desk.asked == []
    desk.clock.now += FIRST_ASK_S
    desk.decider_says = says
    await settled_by_itself(desk, ends, episode)
    assert desk.asked == [(WEST, False)]
    desk.check_writes()


async def test_a_peer_that_is_away_is_asked_again_and_later_asked_to_abort(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"peers": [WEST], "transaction_timeout_s": 100})
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish(decider=WEST))
    for _ in range(9):
        desk.clock.now += 11
        desk.teams.reap()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 2 <= len(desk.asked) <= 6 and not any(presume for _, presume in desk.asked)
    assert episode.state is EpisodeState.PREPARED
    desk.clock.now += 11
    desk.decider_says = TransactionState.UNKNOWN
    await settled_by_itself(desk, EpisodeState.ABORTED, episode)
    assert desk.asked[-1] == (WEST, True)


async def test_a_stranger_is_never_asked(open_desk: OpenDesk) -> None:
    desk = open_desk(server={"peers": ["https://east.example:8321"]})
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish(decider=WEST))
    desk.clock.now += 1e6
    desk.teams.reap()
    await asyncio.sleep(0.01)
    assert desk.asked == [] and episode.state is EpisodeState.PREPARED
    (warning,) = desk.teams.warnings()
    assert WEST in warning and "none of server.peers" in warning and f"/api/transactions/{T1}" in warning


async def test_asked_by_a_peer_the_decider_aborts_what_its_client_left(
    open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk()
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish())
    assert (await desk.teams.look(T1)).state == "prepared"
    assert (await desk.teams.look(T1, presume=True)).state == "aborted"
    assert episode.state is EpisodeState.ABORTED
    other = await begun(desk)
    await desk.teams.prepare(other, finish(T2, decider=WEST))
    assert (await desk.teams.look(T2, presume=True)).state == "prepared"  # it is not for this server to decide
    strange = "x" * 22
    assert (await desk.teams.look(strange)).state == "unknown"
    assert (await desk.teams.look(strange, presume=True)).state == "aborted"
    with pytest.raises(ConflictError):  # it keeps its word
        await desk.teams.prepare(await begun(desk), finish(strange))
    assert desk.ledger.decision(strange) is None  # but a stranger's questions fill no disk,
    monkeypatch.setattr("wingbeat.server.teams.teams.REMEMBERED", 1)
    with pytest.raises(OverloadedError, match="never prepared here"):  # and push out no promise
        await desk.teams.look("y" * 22, presume=True)
    assert (await desk.teams.look(strange, presume=True)).state == "aborted"


# --- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False])
async def test_a_prepared_attempt_outlives_control(open_desk: OpenDesk, restart_desk: Restart, commit: bool) -> None:
    desk = open_desk()
    first, second = await pair(desk)
    await desk.finishing.finish(second, FinishRequest(rewards=0.0))
    await desk.teams.prepare(first, finish())
    desk.check_writes()
    desk = restart_desk(desk)
    episode = desk.episode(first.episode_id)
    assert (episode.state, slot(desk, episode)[0]) == (EpisodeState.PREPARED, SlotState.PREPARED)
    assert (await desk.teams.prepare(episode, finish())).num_sampled_tokens == 2
    desk.clock.now += 1000
    desk.rollouts.reap()
    assert episode.state is EpisodeState.PREPARED
    await desk.teams.decide(T1, commit=commit)
    assert len(desk.solver.buffer) == int(commit)
    assert episode.state is (EpisodeState.FINISHED if commit else EpisodeState.ABORTED)
    desk.check_writes()
    desk = restart_desk(desk)
    assert (await desk.teams.decide(T1, commit=commit)).state == ("committed" if commit else "aborted")
    with pytest.raises(ConflictError):
        await desk.teams.decide(T1, commit=not commit)
    assert desk.teams.in_doubt() == []
    desk.check_writes()


async def test_what_a_restart_cannot_count_any_more_is_aborted_and_told(
    open_desk: OpenDesk, restart_desk: Restart
) -> None:
    """The server must start, whatever was taken out of its configuration."""
    desk = open_desk(policies={"solver": {}, "judge": {"trainable": False}})
    episode = await begun(desk)
    await desk.teams.prepare(episode, finish())
    desk.check_writes()
    desk.config = desk.config.model_copy(update={"policies": {"solver": desk.config.policies["solver"]}})
    desk = restart_desk(desk)
    assert desk.episode(episode.episode_id).state is EpisodeState.ABORTED
    assert slot(desk, episode) == (SlotState.FREE, 2)
    assert [line["event"] for line in desk.log].count("transaction_broken") == 1
    desk.check_writes()
    with pytest.raises(ConflictError, match="aborted here"):
        await desk.teams.decide(T1, commit=True)


async def test_a_rollback_while_it_waits_rebases_what_it_holds(open_desk: OpenDesk) -> None:
    desk = open_desk()
    episode = await begun(desk, version=5)
    await desk.teams.prepare(episode, finish())
    desk.book.rebase("solver", highest=2)
    (samples,) = desk.book.prepared_record(episode.episode_id).samples
    assert {int(v) for part in samples.samples for v in part.versions_T if v >= 0} == {2}
    await desk.teams.decide(T1, commit=True)
    assert slot(desk, episode)[0] is SlotState.FINISHED
    desk.check_writes()
