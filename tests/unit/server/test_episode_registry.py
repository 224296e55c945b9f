"""Attempts: which states follow which, and who is found by what."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import Counter
from typing import Any

import pytest

from wingbeat.core.errors import (
    AuthenticationError,
    EpisodeClosed,
    PermissionDenied,
    UnknownEpisode,
)
from wingbeat.core.protocol import FinishReply
from wingbeat.core.types import Cause, FinishReason, Split, Task
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.replays import Fingerprint
from wingbeat.server.episodes import registry as episodes
from wingbeat.server.episodes.ended import Ended
from wingbeat.server.episodes.registry import TRANSITIONS, EpisodeRegistry, EpisodeState, OpenEpisode
from wingbeat.server.keys.ring import KeyRing, digest
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.messages import Message
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.turns import Turn

GROUP = GroupSpec("g", Task("src", "t"), Split.TRAIN, 1, ("solver",), {"solver": 0})


def attempt(episode_id: str = "ep", number: int = 1, *, key: str = "key", last_seen: float = 0.0) -> OpenEpisode:
    return OpenEpisode(
        episode_id=episode_id,
        attempt=number,
        group=GROUP,
        policies={"solver": None},
        label="",
        key_digest=digest(key),
        idle_timeout_s=100.0,
        began_s=0.0,
        last_seen=last_seen,
        graph=EpisodeGraph(episode_id),
    )


@pytest.fixture
def registry(clock: Any) -> EpisodeRegistry:
    return EpisodeRegistry(KeyRing.of("an-admin-key-123", "worker"), clock=clock)


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("current", "target"), list(itertools.product(EpisodeState, EpisodeState)))
def test_only_transitions_of_the_table_are_possible(current: EpisodeState, target: EpisodeState) -> None:
    episode = attempt()
    episode.state = current
    if target in TRANSITIONS[current]:
        episode.become(target)
        assert episode.state is target
    else:
        with pytest.raises(EpisodeClosed, match=f"is {current}"):
            episode.become(target)
        assert episode.state is current


@pytest.mark.parametrize("state", EpisodeState)
def test_only_open_attempts_take_model_calls(state: EpisodeState) -> None:
    episode = attempt()
    episode.state = state
    if state is EpisodeState.OPEN:
        episode.require_open()
    else:
        with pytest.raises(EpisodeClosed, match=r"begin a new episode|begun on trial"):
            episode.require_open()


def test_turn_ids_are_unique_over_attempts() -> None:
    first, second = attempt(), attempt(number=2)
    assert len({e.new_turn_id() for e in (first, first, second, second)}) == 4


def test_a_key_finds_its_own_attempt_in_header_or_path(registry: EpisodeRegistry) -> None:
    first, second = attempt(key="one"), attempt(number=2, key="two")
    registry.add(first)
    registry.lose(first)
    registry.add(second)
    assert registry.by_key(bearing("one")).attempt == 1
    assert registry.by_key({"x-api-key": "two"}) is second
    assert registry.by_key({}, "two") is second
    assert registry.current("ep") is second
    with pytest.raises(AuthenticationError, match="no API key"):
        registry.by_key({})
    with pytest.raises(AuthenticationError, match="belongs to no episode"):
        registry.by_key(bearing("three"))


def test_by_id_admits_the_own_key_and_the_admin(registry: EpisodeRegistry) -> None:
    first = attempt(key="one")
    registry.add(first)
    assert registry.by_id("ep", bearing("one")) is first
    assert registry.by_id("ep", bearing("an-admin-key-123")) is first
    with pytest.raises(PermissionDenied):
        registry.by_id("other", bearing("one"))
    with pytest.raises(AuthenticationError):
        registry.by_id("ep", bearing("wrong"))
    with pytest.raises(AuthenticationError, match="has expired or is another server's"):
        registry.by_id("ep", bearing("wb-ep-of-long-ago"))
    with pytest.raises(UnknownEpisode):
        registry.by_id("other", bearing("an-admin-key-123"))


@pytest.mark.parametrize("state", [EpisodeState.LOST, EpisodeState.ABORTED])
def test_a_successor_supersedes_what_could_still_have_counted(registry: EpisodeRegistry, state: EpisodeState) -> None:
    first = attempt(key="one")
    registry.add(first)
    first.become(state)
    registry.add(attempt(number=2, key="two"))
    assert first.state is EpisodeState.SUPERSEDED
    found = registry.by_key(bearing("one"))  # for a specific answer to a late call
    assert (found.attempt, found.state) == (1, EpisodeState.SUPERSEDED)


def test_ended_attempts_are_forgotten_in_the_end(registry: EpisodeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "REMEMBERED", 2)
    for number in range(4):
        episode = attempt(f"ep-{number}", key=f"key-{number}")
        registry.add(episode)
        registry.end(episode, EpisodeState.ABORTED)
    assert registry.current("ep-1") is None and registry.current("ep-2") is not None
    with pytest.raises(AuthenticationError):
        registry.by_key(bearing("key-1"))
    assert registry.by_key(bearing("key-3")).num_sampled == 0


def ended_fully(registry: EpisodeRegistry, episode: OpenEpisode) -> None:
    """A finish that counts, as control ends it."""
    registry.add(episode)
    episode.become(EpisodeState.CLOSING)
    episode.finish_digest = "finish"
    episode.finish_reply = FinishReply(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        state=EpisodeState.FINISHED,
        num_turns=3,
        num_sampled_tokens=7,
        warning="rare",
    )
    episode.ended_by(Cause.AGENT_FINISHED, "all is well")
    registry.end(episode, EpisodeState.FINISHED)


def spoken(episode: OpenEpisode, template: ChatTemplate) -> OpenEpisode:
    """With a turn of two tokens."""
    graph = episode.graph
    asked = [Message("user", "hi")]
    graph.commit(
        graph.resolve(policy="solver", agent="", messages=asked, tools=None, template=template),
        turn_id="turn-0",
        token_ids=[5, 6],
        logprobs=[-1.0, -1.0],
        versions=((0, 2),),
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        reply=Message("assistant", "yes"),
    )
    return episode


async def test_what_is_remembered_answers_as_the_attempt_did(registry: EpisodeRegistry) -> None:
    first = attempt(key="one")
    first.client, first.label, first.code = "me", "v1", "c0de"
    registry.add_key(first, digest("two"))
    ended_fully(registry, first)
    for key in ("one", "two"):
        found = registry.by_id("ep", bearing(key))
        assert found is not first
        for name in ("attempt", "group", "policies", "label", "client", "code", "key_digest", "more_keys"):
            assert getattr(found, name) == getattr(first, name)
        for name in ("state", "outcome", "cause", "message", "finish_digest", "finish_reply"):
            assert getattr(found, name) == getattr(first, name)
        assert found.has_finish and await found.finished() == await first.finished()
    assert registry.current("ep") is not None


def test_an_ended_attempt_leaves_one_small_value(
    registry: EpisodeRegistry, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: attempts, graphs and what their turns held go at once, without the collector."""
    monkeypatch.setattr(episodes, "REMEMBERED", 20)
    gc.collect()
    gc.disable()
    before = Counter(type(found) for found in gc.get_objects())
    try:
        for number in range(50):
            ended_fully(registry, spoken(attempt(f"ep-{number}", key=f"key-{number}"), template))
        after = Counter(type(found) for found in gc.get_objects())
    finally:
        gc.enable()
    for kind in (OpenEpisode, EpisodeGraph, Turn, FinishReply, Ended, asyncio.Lock):
        assert after[kind] <= before[kind], kind
    kept = [n for n in range(50) if registry.current(f"ep-{n}") is not None]
    assert kept == list(range(30, 50))


def test_an_attempt_that_changes_after_its_end_is_remembered_as_it_is(
    registry: EpisodeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "REMEMBERED", 2)
    first = attempt(key="one")
    registry.add(first)
    registry.end(first, EpisodeState.ABORTED)
    second = attempt(number=2, key="two")
    registry.add(second)  # the first is superseded
    assert registry.by_key(bearing("one")).state is EpisodeState.SUPERSEDED
    registry.end(second, EpisodeState.ABORTED)
    assert registry.by_key(bearing("one")).state is EpisodeState.SUPERSEDED
    assert (found := registry.current("ep")) is not None and found.attempt == 2
    third = attempt("other", key="three")
    registry.add(third)
    registry.end(third, EpisodeState.ABORTED)
    with pytest.raises(AuthenticationError):
        registry.by_key(bearing("one"))
    assert (found := registry.current("ep")) is not None and found.attempt == 2


def test_forgetting_an_old_attempt_keeps_its_successor(
    registry: EpisodeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "REMEMBERED", 1)
    first, second = attempt(key="one"), attempt(number=2, key="two")
    registry.add(first)
    registry.end(first, EpisodeState.ABORTED)
    registry.remember(first)
    registry.add(second)
    other = attempt("other", key="three")
    registry.add(other)
    registry.end(other, EpisodeState.ABORTED)
    assert registry.current("ep") is second


@pytest.mark.parametrize(
    ("has_heartbeat", "age", "is_lost"), [(True, 41, True), (True, 39, False), (False, 99, False), (False, 101, True)]
)
def test_silence_is_four_heartbeats_or_the_idle_timeout(
    registry: EpisodeRegistry, clock: Any, has_heartbeat: bool, age: float, is_lost: bool
) -> None:
    episode = attempt()
    episode.has_heartbeat = has_heartbeat
    registry.add(episode)
    clock.now = age
    assert (registry.silent(10.0) == [episode]) is is_lost
    episode.calls.add(object())  # pyright: ignore[reportArgumentType] - an open request is life
    assert registry.silent(10.0) == []


class FakeRun:
    """An answer that is kept."""

    turn_ids = ("turn-0",)
    num_bytes = 10
    failed = False
    can_be_joined = True

    def let_go(self) -> None:
        self.can_be_joined = False


def test_what_has_ended_holds_no_answers_and_no_marks(registry: EpisodeRegistry) -> None:
    episode, run = attempt(), FakeRun()
    registry.add(episode)
    episode.seen.add(Fingerprint(b"digest"), run)  # pyright: ignore[reportArgumentType]
    registry.replays.keep(run)  # pyright: ignore[reportArgumentType]
    episode.undelivered.add("turn-0")
    episode.resampled.add("turn-0")
    registry.end(episode, EpisodeState.ABORTED)
    assert (registry.replays.num_bytes, run.can_be_joined, len(episode.seen.order)) == (0, False, 0)
    assert not episode.undelivered and not episode.resampled
