"""Every way an attempt can end: its outcome, its cause, what is told of it, and that only ``agent`` counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wingbeat.core.errors import (
    CallTimeout,
    EpisodeClosed,
    LimitReached,
    NoEngine,
    RequestError,
    UnavailableError,
    WingbeatError,
)
from wingbeat.core.protocol import AbortRequest, BeginRequest, FinishRequest, LeaseRequest
from wingbeat.core.types import OUTCOME_OF, REPORTABLE, UNSAID, Cause, Outcome, Split, Task
from wingbeat.server.episodes.endings import fault_of_call
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode

OpenDesk = Callable[..., Any]


async def begun(desk: Any, count: int) -> list[OpenEpisode]:
    """Leased and begun training episodes with a turn each."""
    if not desk.dealer.sources:
        desk.dealer.add_source("src", Split.TRAIN, [Task("src", f"t{i}") for i in range(50)])
    leases = (await desk.rollouts.lease(LeaseRequest(max_leases=count, splits=[Split.TRAIN], wait_s=0))).leases
    found: list[OpenEpisode] = []
    for lease in leases:
        request = BeginRequest(idempotency_key=lease.lease_id, lease_id=lease.lease_id)
        episode = desk.episode((await desk.rollouts.begin(request, base_url="")).episode_id)
        desk.take_turn(episode)
        found.append(episode)
    return found


def test_the_tables_agree() -> None:
    assert set(OUTCOME_OF) == set(Cause) and set(UNSAID) == set(Outcome)
    assert all(OUTCOME_OF[cause] is outcome for outcome, cause in UNSAID.items())
    assert [cause for cause, outcome in OUTCOME_OF.items() if outcome is Outcome.AGENT] == [Cause.AGENT_FINISHED]
    assert Cause.AGENT_FINISHED not in REPORTABLE  # an abort never counts


@pytest.mark.parametrize("cause", sorted(Cause))
def test_an_abort_names_a_cause_of_its_outcome_that_its_client_can_know(cause: Cause) -> None:
    for outcome in Outcome:
        if cause in REPORTABLE and OUTCOME_OF[cause] is outcome:
            assert AbortRequest(outcome=outcome, cause=cause).cause is cause
        else:
            with pytest.raises(ValueError, match=f"expected a cause of outcome {outcome}"):
                AbortRequest(outcome=outcome, cause=cause)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (NoEngine("none"), Cause.NO_ENGINE),
        (UnavailableError("given up"), Cause.MODEL_CALL_FAILED),
        (WingbeatError("a bug of ours"), Cause.MODEL_CALL_FAILED),
        (CallTimeout("too long"), Cause.CALL_DEADLINE),
        (RequestError("wrong"), None),
        (EpisodeClosed("over"), None),
        (LimitReached("too much"), None),
    ],
)
def test_who_is_to_blame_for_a_failed_call(error: WingbeatError, cause: Cause | None) -> None:
    assert fault_of_call(error) is cause


async def test_an_agent_that_raises_over_our_fault_is_not_to_blame(open_desk: OpenDesk) -> None:
    desk = open_desk(group_size=8)
    said = [
        (Cause.AGENT_RAISED, Cause.NO_ENGINE, Cause.NO_ENGINE),
        (Cause.AGENT_RAISED, Cause.CALL_DEADLINE, Cause.CALL_DEADLINE),
        (None, Cause.MODEL_CALL_FAILED, Cause.MODEL_CALL_FAILED),
        (Cause.AGENT_RAISED, None, Cause.AGENT_RAISED),
        (Cause.CLIENT_STOPPED, Cause.NO_ENGINE, Cause.CLIENT_STOPPED),
        (None, None, Cause.CLIENT_ABORTED),
    ]
    episodes = await begun(desk, len(said))
    for episode, (cause, fault, expected) in zip(episodes, said, strict=True):
        episode.call_fault = fault
        desk.finishing.abort(episode, AbortRequest(cause=cause, message="why"))
        assert (episode.cause, episode.outcome, episode.message) == (expected, OUTCOME_OF[expected], "why")
    desk.check_writes()
    for episode, (_, _, expected) in zip(episodes, said, strict=True):
        (attempt,) = desk.ledger.episode(episode.episode_id)
        assert (attempt.outcome, attempt.cause, attempt.message) == (OUTCOME_OF[expected], expected, "why")
    assert sum(desk.endings.counts.values()) == len(said)


async def test_silence_and_deadlines_are_told_apart(open_desk: OpenDesk, clock: Any) -> None:
    desk = open_desk(group_size=3, episode_deadline_s=50.0)
    beating, silent, alive = await begun(desk, 3)
    beating.has_heartbeat = True
    clock.now += 10
    desk.rollouts.reap()
    assert (beating.state, beating.cause) == (EpisodeState.LOST, Cause.HEARTBEAT_LOST)
    assert list(desk.rollouts.overdue()) == []
    clock.now += 41
    alive.last_seen = clock.now
    assert list(desk.rollouts.overdue()) == [silent, alive]
    desk.finishing.break_off(alive, Cause.EPISODE_DEADLINE, "over")
    assert (alive.state, alive.outcome) == (EpisodeState.ABORTED, Outcome.TIMEOUT)
    with pytest.raises(EpisodeClosed):
        await desk.finishing.finish(alive, FinishRequest(rewards=1.0))
    clock.now += 60
    desk.rollouts.reap()
    assert silent.cause is Cause.CLIENT_VANISHED
    assert desk.endings.counts == {
        "client/heartbeat_lost": 1,
        "timeout/episode_deadline": 1,
        "client/client_vanished": 1,
    }
    assert b'wingbeat_attempts_total{cause="episode_deadline",outcome="timeout",split="train"} 1.0' in (
        desk.metrics.render()
    )


ENDINGS = st.lists(
    st.one_of(
        st.tuples(st.just("finish"), st.sampled_from(Outcome)),
        st.tuples(st.just("abort"), st.sampled_from([o for o in Outcome if o is not Outcome.AGENT])),
        st.tuples(st.just("break"), st.sampled_from(sorted(set(Cause) - {Cause.AGENT_FINISHED}))),
        st.tuples(st.just("lose"), st.none()),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture
def shared_desk(open_desk: OpenDesk) -> Any:
    return open_desk(group_size=2, groups_per_step=50, max_staleness=10, max_attempts=1, drop_zero_variance=False)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(endings=ENDINGS)
async def test_only_agent_outcomes_reach_a_baseline(shared_desk: Any, clock: Any, endings: list[Any]) -> None:
    """Whatever else happens: the buffer holds the finishes with outcome ``agent``, and nothing besides."""
    desk = shared_desk
    counted: set[tuple[str, int]] = set()
    for kind, how in endings:
        (episode,) = await begun(desk, 1)
        if kind == "finish":
            await desk.finishing.finish(episode, FinishRequest(outcome=how, rewards=1.0))
            counted |= {(episode.episode_id, episode.attempt)} if how is Outcome.AGENT else set()
        elif kind == "abort":
            desk.finishing.abort(episode, AbortRequest(outcome=how))
        elif kind == "break":
            desk.finishing.break_off(episode, how, "")
        else:
            clock.now += 1000
            desk.rollouts.reap()
        if kind != "lose":
            assert episode.cause is not None and OUTCOME_OF[episode.cause] is episode.outcome
        desk.finishing.settle()
    while desk.book.counts().num_groups:  # close the last group, too
        (episode,) = await begun(desk, 1)
        desk.finishing.abort(episode, AbortRequest())
        desk.finishing.settle()
    trained = {(m.episode_id, m.attempt) for group in desk.solver.buffer.clear() for m in group.members}
    assert trained == counted
    desk.check_writes()


async def test_the_end_of_one_overdue_episode_may_close_the_group_of_another(open_desk: OpenDesk, clock: Any) -> None:
    desk = open_desk(group_size=3, group_floor=1, group_deadline_s=50.0, episode_deadline_s=50.0)
    first, *overdue = await begun(desk, 3)
    await desk.finishing.finish(first, FinishRequest(rewards=1.0))
    clock.now += 60
    for episode in desk.rollouts.overdue():  # as control does
        desk.finishing.break_off(episode, Cause.EPISODE_DEADLINE, "over")
    assert [e.cause for e in overdue] == [Cause.EPISODE_DEADLINE, Cause.GROUP_DEADLINE]
    desk.check_writes()
