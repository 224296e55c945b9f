"""Buffers and filters: what trains, what is dropped, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from wingbeat.core.errors import ConflictError
from wingbeat.core.samples import TurnCredit
from wingbeat.dataflow.buffer import DiscardCount, PolicyBuffer
from wingbeat.dataflow.operators import VarianceRule, has_zero_variance
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
    buffer = new_buffer(groups_per_step=1, straggler="drop")
    buffer.add(replace(group, floor_version=1, members=(old, *group.members[1:])))
    draft = buffer.take(3)
    assert [e.episode_id for e in draft.episodes] == ["a-1", "a-2"]
    assert draft.dropped == (Dropped("a-0", 1, "stale"),)
    assert buffer.discards == {DropReason.STALE: DiscardCount(num_episodes=1, num_tokens=2)}


@pytest.mark.parametrize("straggler", ["wait", "mask"])
def test_over_age_tokens_are_masked_and_their_episode_trains(make, straggler):
    group = make.ready("a", rewards=(0.0, 1.0, 2.0), floor=3)
    old = make.samples("a-0", group_id="a", reward=0.0, versions=(1, 3))
    gone = make.samples("a-1", group_id="a", reward=1.0, versions=(1, 1, 1))
    buffer = new_buffer(groups_per_step=1, straggler=straggler)
    buffer.add(replace(group, floor_version=1, members=(old, gone, group.members[2])))
    draft = buffer.take(3)
    assert [(e.episode_id, e.num_sampled, e.masked) for e in draft.episodes] == [
        ("a-0", 1, 1),
        ("a-1", 0, 3),
        ("a-2", 2, 0),
    ]
    assert draft.dropped == () and buffer.discards == {}
    metrics = buffer.token_metrics()
    assert sum(v for k, v in metrics.items() if k.startswith("tokens/trained/")) == 3
    assert sum(v for k, v in metrics.items() if k.startswith("tokens/masked/")) == 4


def test_time_in_the_queue_counts_as_age_prime_rl_3009(make):
    """Born at v3, finished at v3, queued until v12 under a bound of 8: age 9, dropped."""
    for straggler in ("wait", "mask", "drop"):
        buffer = new_buffer(groups_per_step=1, max_staleness=8, straggler=straggler)
        buffer.add(make.ready("queued", floor=3))
        assert buffer.take(12) is None
        assert {d.reason for d in buffer.drain_dropped()} == {"stale"}
        assert buffer.discards[DropReason.STALE].num_episodes == 2
        buffer.add(make.ready("in-time", floor=4))
        assert buffer.take(12).group_ids == ("in-time",)


def test_a_step_later_masks_more_and_counts_each_token_once(make):
    buffer = new_buffer(groups_per_step=2, straggler="mask")
    member = make.samples("a-0", group_id="a", reward=0.0, versions=(1, 2, 3, 4))
    other = make.samples("a-1", group_id="a", reward=1.0, versions=(4,))
    buffer.add(replace(make.ready("a", floor=1), members=(member, other)))
    assert buffer.take(3) is None  # masks version 1
    buffer.add(make.ready("b", floor=4))
    draft = buffer.take(4)  # masks version 2
    assert [(e.episode_id, e.num_sampled, e.masked) for e in draft.episodes if e.masked] == [("a-0", 2, 2)]
    metrics = buffer.token_metrics()
    assert sum(v for k, v in metrics.items() if k.startswith("tokens/masked/")) == 2
    assert sum(v for k, v in metrics.items() if k.startswith("tokens/trained/")) == 2 + 1 + 4


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
    buffer = new_buffer(groups_per_step=2, dynamic_sampling=True, straggler="drop")
    buffer.add(replace(group, floor_version=0, members=(*group.members[:2], odd_one)))
    buffer.add(make.ready("b", floor=3))
    assert buffer.take(3) is None and len(buffer) == 1  # what is left of the first one does not count any more
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
    buffer = new_buffer(groups_per_step=1, dynamic_sampling=True)
    buffer.add(replace(make.ready("of two", rewards=(1.0,)), size=2))
    buffer.add(make.ready("of one", rewards=(1.0,)))
    assert buffer.take(0).group_ids == ("of one",)


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


def test_cleared_groups_can_be_added_again(make):
    buffer = new_buffer()
    for group_id, floor in [("b", 2), ("a", 1)]:
        buffer.add(make.ready(group_id, floor=floor))
    groups = buffer.clear()
    assert [g.group_id for g in groups] == ["a", "b"] and len(buffer) == 0
    for group in groups:
        buffer.add(group)
    assert buffer.take(2).group_ids == ("a", "b")


def test_members_that_operators_drop_first_are_counted_by_their_reason(make):
    buffer = new_buffer(groups_per_step=1)
    group = make.ready("a", rewards=(0.0, 1.0, 2.0))
    buffer.count_dropped(group, [Dropped("a-1", 1, "too_long"), Dropped("a-2", 1, "too_long")])
    buffer.add(replace(group, members=group.members[:1]))
    assert buffer.discards == {"too_long": DiscardCount(num_episodes=2, num_tokens=4)}
    assert buffer.drain_dropped() == ()  # who dropped them recorded it


def composing(change):
    return new_buffer(groups_per_step=1, compose=lambda draft, version: change(draft))


def test_operators_may_add_replayed_members_and_drop_others(make):
    replayed = make.samples("old-0", group_id="old", versions=(0, 0, 0))
    buffer = composing(
        lambda draft: replace(
            draft,
            episodes=(*draft.episodes[1:], replayed),
            replayed=(("old-0", 1),),
            dropped=(*draft.dropped, Dropped("a-0", 1, "surplus")),
        )
    )
    buffer.add(make.ready("a", rewards=(0.0, 1.0)))
    draft = buffer.take(0)
    assert [e.episode_id for e in draft.episodes] == ["a-1", "old-0"]
    assert (draft.replayed, draft.dropped) == ((("old-0", 1),), (Dropped("a-0", 1, "surplus"),))
    metrics = buffer.token_metrics()
    assert sum(v for k, v in metrics.items() if k.startswith("tokens/trained/")) == 2  # replayed ones counted before
    assert sum(v for k, v in metrics.items() if k.startswith("tokens/discarded/surplus/")) == 2


def test_a_batch_that_operators_empty_is_no_step(make):
    def emptied(draft):
        drops = tuple(Dropped(e.episode_id, e.attempt, "surplus") for e in draft.episodes)
        return replace(draft, episodes=(), dropped=(*draft.dropped, *drops))

    buffer = composing(emptied)
    buffer.add(make.ready("a"))
    assert buffer.take(0) is None
    assert [d.reason for d in buffer.drain_dropped()] == ["surplus", "surplus"]


@pytest.mark.parametrize("fault", ["repeats", "invents", "loses", "trains what it drops"])
def test_faults_of_operators_are_refused(make, fault):
    stranger = make.samples("x-0", group_id="x")
    changes = {
        "repeats": lambda d: replace(d, episodes=(*d.episodes, d.episodes[0])),
        "invents": lambda d: replace(d, episodes=(*d.episodes, stranger)),
        "loses": lambda d: replace(d, episodes=d.episodes[1:]),
        "trains what it drops": lambda d: replace(d, dropped=(Dropped("a-0", 1, "surplus"),)),
    }
    buffer = composing(changes[fault])
    buffer.add(make.ready("a"))
    with pytest.raises(ValueError, match="keep or drop every member"):
        buffer.take(0)


def test_replayed_members_too_old_to_train_are_refused(make):
    replayed = make.samples("old-0", group_id="old", versions=(0, 3))
    buffer = composing(lambda d: replace(d, episodes=(*d.episodes, replayed), replayed=(("old-0", 1),)))
    buffer.add(make.ready("a", floor=3))
    with pytest.raises(ValueError, match="too old"):
        buffer.take(3)


GROUPS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4)))


@given(
    GROUPS,
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.integers(0, 8),
    st.sampled_from(["wait", "mask", "drop"]),
)
def test_every_member_trains_once_or_is_dropped_once_or_waits(
    make, groups, per_step, bound, drop, dynamic, version, straggler
):
    buffer = new_buffer(
        groups_per_step=per_step,
        max_staleness=bound,
        drop_zero_variance=drop,
        dynamic_sampling=dynamic,
        straggler=straggler,
    )
    num_tokens = 0
    for i, (floor, rewards) in enumerate(groups):
        members = tuple(
            make.samples(f"g{i}-{j}", group_id=f"g{i}", reward=reward, versions=tuple(range(floor, floor + j + 1)))
            for j, reward in enumerate(rewards)
        )
        num_tokens += sum(m.num_sampled for m in members)
        buffer.add(ReadyGroup(f"g{i}", "solver", floor_version=floor, size=len(rewards), members=members))
    trained, dropped = [], []
    while (draft := buffer.take(version)) is not None:
        assert draft.num_groups == per_step and draft.episodes
        assert all(version - e.min_version <= bound for e in draft.episodes if e.num_sampled)
        trained += [e.episode_id for e in draft.episodes]
        dropped += [d.episode_id for d in draft.dropped]
    dropped += [d.episode_id for d in buffer.drain_dropped()]
    seen = trained + dropped
    assert len(seen) == len(set(seen))
    assert len(buffer) < per_step
    assert sum(count.num_episodes for count in buffer.discards.values()) == len(dropped)
    waiting = sum(member.num_sampled + member.masked for group in buffer.clear() for member in group.members)
    assert sum(buffer.token_metrics().values()) + waiting == num_tokens


def test_groups_whose_turns_earned_differently_have_variance(make):
    """Equal totals, but 1 + 0 is not 0 + 1 where credit is per turn."""
    members = tuple(
        structs.replace(
            make.samples(f"a-{i}"), turns=(TurnCredit("t0", reward=first), TurnCredit("t1", "t0", reward=1.0 - first))
        )
        for i, first in enumerate((0.0, 1.0))
    )
    group = ReadyGroup("a", "solver", floor_version=0, size=2, members=members)
    per_episode = new_buffer(groups_per_step=1, dynamic_sampling=True)
    assert not per_episode.add(group)
    per_turn = new_buffer(groups_per_step=1, dynamic_sampling=True, variance=VarianceRule("turn", 1.0))
    assert per_turn.add(group)
    assert per_turn.take(0).group_ids == ("a",)
