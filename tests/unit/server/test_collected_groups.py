"""A conversation with feedback trains only where that holds nothing back, and nothing that must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.records import ClosedGroup, EpisodeRecord, GroupSpec
from wingbeat.dataflow.staleness import StalenessGate
from wingbeat.server.collect.conversations import group_id_of, new_episode_id
from wingbeat.server.collect.groups import CollectedGroups, Settled


def conversation(*versions: int, split: Split = Split.TRAIN, agents: int = 1) -> ClosedGroup:
    """Of one that sampled a token of each version, with its feedback."""
    episode_id = new_episode_id()
    group_id = group_id_of(episode_id)
    spec = GroupSpec(group_id, Task("collect:shop", episode_id), split, 1, ("solver",), {"solver": min(versions)})
    length = 1 + len(versions)
    sample = TrainingSample.build(
        episode_id,
        token_ids=np.arange(length, dtype=np.int32),
        sampled=np.array([0, *(1 for _ in versions)], np.uint8),
        sampling_logprobs=np.array([0, *(-0.5 for _ in versions)], np.float32),
        versions=np.array([-1, *versions], np.int32),
    )
    members = tuple(
        EpisodeSamples(episode_id, 1, group_id, "solver", f"agent-{number}", 1.0, (sample,)) for number in range(agents)
    )
    record = EpisodeRecord(episode_id, 1, group_id, Outcome.AGENT, "digest", rewards={"solver": 1.0}, samples=members)
    return ClosedGroup(spec, (record,), (), ())


class Place:
    """A desk whose solver learns from groups of one."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk
        self.host = desk.solver
        self.groups = CollectedGroups(desk.policies, desk.ledger, watch=desk.writes.append)

    def settle(self, group: ClosedGroup) -> Settled:
        self.desk.ledger.record_collected(group.spec, group.finished[0]).result(10)
        settled = self.groups.settle(group)
        self.desk.check_writes()
        return settled

    def reasons(self, group: ClosedGroup) -> set[str | None]:
        (view,) = self.desk.ledger.episode(group.finished[0].episode_id)
        return {status.reason for status in view.samples}


@pytest.fixture
def open_place(open_desk: Any) -> Any:
    def build(algorithm: str = "reinforce", **options: Any) -> Place:
        desk = open_desk(policies={"solver": {"trainer": {"algorithm": algorithm}}}, **options)
        return Place(desk)

    return build


def test_what_is_in_time_waits_like_any_other_group(open_place: Any) -> None:
    place = open_place()
    group = conversation(0, 0)
    assert place.settle(group) == Settled("trained", "", ("solver",))
    (waiting,) = place.host.buffer.clear()
    assert (waiting.floor_version, waiting.size, len(waiting.members)) == (0, 1, 1)
    assert place.desk.ledger.unconsumed("solver")[0].group_id == group.spec.id
    assert place.desk.ledger.open_groups() == ()


def test_what_is_too_old_is_dropped_and_told(open_place: Any) -> None:
    place = open_place()
    place.host.version = 2
    group = conversation(0, 0)
    settled = place.settle(group)
    assert settled.result == "stale" and "version 0 and is too old for version 3" in settled.warning
    assert len(place.host.buffer) == 0 and place.reasons(group) == {"stale"}
    assert place.host.buffer.discards["stale"].num_episodes == 1
    assert place.desk.ledger.unconsumed("solver") == ()


@pytest.mark.parametrize(("straggler", "result"), [("wait", "trained"), ("mask", "trained"), ("drop", "stale")])
def test_of_a_long_one_the_old_tokens_lose_their_part(open_place: Any, straggler: str, result: str) -> None:
    options = {} if straggler == "wait" else {"straggler_wait_s": 60.0}
    place = open_place(straggler=straggler, **options)
    place.host.version = 3
    assert place.settle(conversation(0, 1, 2, 3)).result == result
    if result == "trained":
        (waiting,) = place.host.buffer.clear()
        assert (waiting.floor_version, waiting.members[0].num_sampled, waiting.members[0].masked) == (2, 2, 2)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "dapo"])
def test_algorithms_that_compare_a_group_train_none(open_place: Any, algorithm: str) -> None:
    place = open_place(algorithm)
    group = conversation(0)
    settled = place.settle(group)
    assert settled.result == "no_baseline" and algorithm in settled.warning
    assert len(place.host.buffer) == 0 and place.reasons(group) == {"no_baseline"}


def test_positive_feedback_trains_by_imitation(open_desk: Any) -> None:
    desk = open_desk(policies={"solver": {"trainer": {"algorithm": "sft", "sft_min_reward": 0.5}}})
    assert Place(desk).settle(conversation(0)).result == "trained"


def test_feedback_after_the_last_step_waits_for_the_run_to_go_on(open_place: Any, restart_desk: Any) -> None:
    place = open_place(steps=1)
    place.host.version = 1
    assert "run.steps" in place.settle(conversation(1)).warning
    halted = open_place()
    halted.host.halt("a step failed")
    group = conversation(0)
    assert "a step failed" in halted.settle(group).warning
    assert len(halted.host.buffer) == 0
    desk = restart_desk(halted.desk)
    assert [waiting.group_id for waiting in desk.solver.buffer.clear()] == [group.spec.id]


def test_what_must_only_be_recorded_reaches_no_policy(open_place: Any) -> None:
    place = open_place()
    group = conversation(0, split=Split.EVAL)
    assert place.settle(group) == Settled("recorded")
    assert len(place.host.buffer) == 0 and place.reasons(group) == set()


def test_training_in_time_stays_possible(open_place: Any) -> None:
    """Whatever feedback comes when: what could be trained in time before still can."""
    place = open_place(max_staleness=2, groups_per_step=2, steps=100)
    gate = StalenessGate(2, 2)

    @settings(max_examples=100, deadline=None)
    @given(
        floors=st.lists(st.integers(0, 6), max_size=8),
        version=st.integers(0, 6),
        sampled=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    )
    def check(floors: list[int], version: int, sampled: list[int]) -> None:
        floors = [floor for floor in floors if floor <= version]
        sampled = [min(one, version) for one in sampled]
        assume(gate.is_feasible(version, floors))
        place.host.buffer.clear()
        place.host.version = version
        place.host._running_floors = lambda policy: floors
        settled = place.groups.settle(conversation(*sampled))
        assert gate.is_feasible(version, [*floors, *place.host.buffer.floors()])
        trainable = [one for one in sampled if one >= version - 2]
        fits = bool(trainable) and gate.is_feasible(version, [*floors, min(trainable)])
        assert (settled.result == "trained") == fits

    check()


def test_a_kill_between_feedback_and_buffer_loses_nothing(open_place: Any, restart_desk: Any) -> None:
    place = open_place()
    fresh, old = conversation(3), conversation(0)
    for group in (fresh, old, conversation(3, split=Split.EVAL)):
        place.desk.ledger.record_collected(group.spec, group.finished[0]).result(10)
    desk = restart_desk(place.desk)
    desk.solver.version = 3
    desk.finishing.settle()
    desk.check_writes()
    assert [waiting.group_id for waiting in desk.solver.buffer.clear()] == [fresh.spec.id]
    assert Place(desk).reasons(old) == {"stale"}
    assert not desk.book.groups_with_free_slots() and desk.ledger.open_groups() == ()
    assert desk.ledger.verify() == []


def test_the_same_group_can_only_come_once(open_place: Any) -> None:
    place = open_place()
    group = conversation(0)
    record = group.finished[0]
    assert place.desk.ledger.record_collected(group.spec, record).result(10)
    assert not place.desk.ledger.record_collected(group.spec, record).result(10)
    other = place.desk.ledger.record_collected(group.spec, replace(record, finish_digest="other"))
    with pytest.raises(Exception, match="another body"):
        other.result(10)
