"""Buffers and filters: what trains, what is dropped, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import ConflictError
from wingbeat.dataflow.buffer import DiscardCount, PolicyBuffer
from wingbeat.dataflow.operators import filter_stale, filter_zero_variance, has_zero_variance
from wingbeat.dataflow.records import Dropped, DropReason, ReadyGroup

EQUAL = (1.0, 1.0)


def new_buffer(**options) -> PolicyBuffer:
    return PolicyBuffer("solver", **({"groups_per_step": 2, "max_staleness": 1} | options))


def test_oldest_floor_first_and_arrival_breaks_ties(make):
    buffer = new_buffer()
    for group_id, floor in [("new", 2), ("old-a", 1), ("old-b", 1), ("oldest", 0)]:
        buffer.add(make.ready(group_id, floor=floor))
    assert buffer.floors() == [0, 1, 1, 2]
    assert buffer.take(1).group_ids == ("oldest", "old-a")
    assert buffer.take(2).group_ids == ("old-b", "new")
    assert buffer.take(2) is None and len(buffer) == 0


def test_too_few_groups_wait(make):
    buffer = new_buffer()
    buffer.add(make.ready("a"))
    assert buffer.take(0) is None
    assert len(buffer) == 1


def test_draft_holds_all_members_of_its_groups(make):
    buffer = new_buffer()
    buffer.add(make.ready("a", rewards=(0.0, 1.0, 2.0)))
    buffer.add(make.ready("b"))
    draft = buffer.take(0)
    assert [e.episode_id for e in draft.episodes] == ["a-0", "a-1", "a-2", "b-0", "b-1"]
    assert (draft.num_groups, draft.dropped) == (2, ())


def test_over_age_members_are_dropped_and_the_rest_trains(make):
    group = make.ready("a", rewards=(0.0, 1.0, 2.0), floor=3)
    old = make.samples("a-0", group_id="a", reward=0.0, versions=(1, 3))
    buffer = new_buffer(groups_per_step=1)
    buffer.add(replace(group, floor_version=1, members=(old, *group.members[1:])))
    draft = buffer.take(3)
    assert [e.episode_id for e in draft.episodes] == ["a-1", "a-2"]
    assert draft.dropped == (Dropped("a-0", 1, "stale"),)
    assert buffer.discards == {DropReason.STALE: DiscardCount(num_episodes=1, num_tokens=2)}


def test_staleness_is_inclusive_and_takes_all_agents_of_an_episode(make):
    members = tuple(make.samples("a-0", agent=agent, versions=(version,)) for agent, version in [("x", 4), ("y", 2)])
    group = ReadyGroup("a", "solver", floor_version=2, size=2, members=members)
    assert filter_stale(group, version=4, max_staleness=2).group == group
    filtered = filter_stale(group, version=5, max_staleness=2)
    assert (filtered.group, filtered.dropped, filtered.reason) == (None, members, DropReason.STALE)


def test_group_lost_to_staleness_does_not_count(make):
    buffer = new_buffer(groups_per_step=1)
    buffer.add(make.ready("old", floor=0))
    buffer.add(make.ready("new", floor=4))
    draft = buffer.take(4)
    assert draft.group_ids == ("new",)
    assert {d.episode_id for d in draft.dropped} == {"old-0", "old-1"}


def test_zero_variance_counts_without_training(make):
    buffer = new_buffer()
    buffer.add(make.ready("flat", rewards=EQUAL))
    buffer.add(make.ready("b"))
    draft = buffer.take(0)
    assert draft.group_ids == ("flat", "b")
    assert {e.group_id for e in draft.episodes} == {"b"}
    assert draft.dropped == (Dropped("flat-0", 1, "zero_variance"), Dropped("flat-1", 1, "zero_variance"))
    assert buffer.discards[DropReason.ZERO_VARIANCE] == DiscardCount(num_episodes=2, num_tokens=4)


def test_dynamic_sampling_does_not_count_zero_variance(make):
    buffer = new_buffer(dynamic_sampling=True, drop_zero_variance=False)
    buffer.add(make.ready("flat", rewards=EQUAL))
    buffer.add(make.ready("a"))
    assert buffer.take(0) is None
    buffer.add(make.ready("b"))
    draft = buffer.take(0)
    assert draft.group_ids == ("a", "b")
    assert {d.episode_id for d in draft.dropped} == {"flat-0", "flat-1"}


def test_dynamic_sampling_sees_what_staleness_left(make):
    group = make.ready("a", rewards=(1.0, 1.0, 0.0), floor=3)
    odd_one = make.samples("a-2", group_id="a", reward=0.0, versions=(0,))
    buffer = new_buffer(groups_per_step=1, dynamic_sampling=True)
    buffer.add(replace(group, floor_version=0, members=(*group.members[:2], odd_one)))
    assert buffer.take(3) is None
    assert [d.reason for d in buffer.drain_dropped()] == ["stale", "zero_variance", "zero_variance"]


def test_neither_option_trains_everything(make):
    buffer = new_buffer(groups_per_step=1, drop_zero_variance=False)
    buffer.add(make.ready("flat", rewards=EQUAL))
    assert len(buffer.take(0).episodes) == 2


def test_a_batch_without_any_signal_is_skipped(make):
    buffer = new_buffer()
    for group_id in ("f1", "f2"):
        buffer.add(make.ready(group_id, rewards=EQUAL))
    assert buffer.take(0) is None and len(buffer) == 0
    for group_id in ("a", "b"):
        buffer.add(make.ready(group_id))
    draft = buffer.take(0)
    assert draft.group_ids == ("a", "b")
    assert {d.episode_id for d in draft.dropped} == {"f1-0", "f1-1", "f2-0", "f2-1"}
    assert buffer.drain_dropped() == ()


def test_groups_without_tokens_are_discarded_at_once(make):
    members = tuple(make.samples(f"a-{i}", reward=float(i), versions=()) for i in range(2))
    buffer = new_buffer(groups_per_step=1)
    buffer.add(ReadyGroup("a", "solver", floor_version=0, size=2, members=members))
    assert len(buffer) == 0
    assert [d.reason for d in buffer.drain_dropped()] == ["no_tokens", "no_tokens"]


def test_single_episode_groups_have_no_variance_to_miss(make):
    group = make.ready("a", rewards=(1.0,))
    assert filter_zero_variance(group).group == group
    assert filter_zero_variance(replace(group, size=2)).group is None


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"x": (1.0, 1.0), "y": (0.0, 0.0)}, True),
        ({"x": (1.0, 1.0), "y": (0.0, 0.5)}, False),
        ({"": (0.0, 0.0)}, True),
    ],
)
def test_variance_is_judged_per_agent(make, rewards, expected):
    members = tuple(
        make.samples(f"a-{i}", agent=agent, reward=reward)
        for agent, values in rewards.items()
        for i, reward in enumerate(values)
    )
    assert has_zero_variance(ReadyGroup("a", "solver", floor_version=0, size=2, members=members)) is expected


def test_wrong_policy_and_repeats_are_refused(make):
    buffer = new_buffer()
    buffer.add(make.ready("a"))
    with pytest.raises(ConflictError, match="already"):
        buffer.add(make.ready("a"))
    with pytest.raises(ValueError, match="other"):
        buffer.add(replace(make.ready("b"), policy="other"))


GROUPS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4)))


@given(GROUPS, st.integers(1, 3), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 8))
def test_every_member_trains_once_or_is_dropped_once_or_waits(make, groups, per_step, bound, drop, dynamic, version):
    buffer = new_buffer(
        groups_per_step=per_step, max_staleness=bound, drop_zero_variance=drop, dynamic_sampling=dynamic
    )
    for i, (floor, rewards) in enumerate(groups):
        buffer.add(make.ready(f"g{i}", rewards=tuple(rewards), floor=floor))
    trained, dropped = [], []
    while (draft := buffer.take(version)) is not None:
        assert draft.num_groups == per_step and draft.episodes
        assert all(version - e.min_version <= bound for e in draft.episodes)
        trained += [e.episode_id for e in draft.episodes]
        dropped += [d.episode_id for d in draft.dropped]
    dropped += [d.episode_id for d in buffer.drain_dropped()]
    seen = trained + dropped
    assert len(seen) == len(set(seen))
    assert len(buffer) < per_step
    assert sum(count.num_episodes for count in buffer.discards.values()) == len(dropped)
