"""Ages of single tokens: what masking takes out, what it leaves alone, and rollbacks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.dataflow.aging import drop_over_age, mask_over_age, mask_sample, rebase_member
from wingbeat.dataflow.records import ReadyGroup


def partial_rollout() -> TrainingSample:
    """Two turns, sampled while the weights went from version 4 to 7; one token under a grammar in each."""
    return TrainingSample.build(
        "e-0/solver/",
        token_ids=np.array([1, 2, 10, 11, 12, 20, 30, 31], np.int32),
        sampled=np.array([0, 0, 1, 1, 1, 0, 1, 1], np.uint8),
        sampling_logprobs=np.array([0, 0, -0.1, -0.2, -0.3, 0, -0.4, -0.5], np.float32),
        versions=np.array([-1, -1, 4, 4, 5, -1, 6, 7], np.int32),
        turn_ids=("t1", "t2"),
        turn_starts=(2, 6),
        support_table=(b"\x01a", b"\x01b"),
        support_index=np.array([-1, -1, 0, -1, -1, -1, 1, -1], np.int32),
    )


def test_only_old_tokens_of_a_partial_rollout_are_masked():
    sample = mask_sample(partial_rollout(), oldest=5)
    assert sample.sampled_T.tolist() == [0, 0, 0, 0, 1, 0, 1, 1]
    assert sample.tokens_T.tolist() == [1, 2, 10, 11, 12, 20, 30, 31]
    assert sample.versions_T.tolist() == [-1, -1, -1, -1, 5, -1, 6, 7]
    assert sample.sampling_logprobs_T.tolist() == pytest.approx([0, 0, 0, 0, -0.3, 0, -0.4, -0.5])
    assert sample.support_index_T.tolist() == [-1, -1, -1, -1, -1, -1, 1, -1]
    assert (sample.turn_ids, sample.turn_starts) == (("t1", "t2"), (2, 6))
    assert sample.support_table[sample.support_index_T[6]] == b"\x01b"
    assert sample.min_version == 5


def test_a_sample_without_old_tokens_stays_the_same_object():
    sample = partial_rollout()
    assert mask_sample(sample, oldest=4) is sample


def member(*samples: TrainingSample, agent: str = "", episode_id: str = "e-0") -> EpisodeSamples:
    return EpisodeSamples(episode_id, 1, "e", "solver", agent, 1.0, samples)


def group(*members: EpisodeSamples) -> ReadyGroup:
    return ReadyGroup("e", "solver", floor_version=4, size=8, members=members)


def test_an_episode_across_versions_trains_with_its_young_tokens():
    """Trainer at 7, bound 1: versions 4 and 5 are over-age, 6 and 7 are not."""
    aged = mask_over_age(group(member(partial_rollout())), version=7, max_staleness=1)
    assert aged.dropped == () and aged.group is not None
    (kept,) = aged.group.members
    assert (kept.num_sampled, kept.masked, kept.min_version) == (2, 3, 6)


def test_staleness_is_inclusive():
    whole = group(member(partial_rollout()))
    assert mask_over_age(whole, version=7, max_staleness=3).group == whole
    assert drop_over_age(whole, version=7, max_staleness=3).group == whole
    assert drop_over_age(whole, version=8, max_staleness=3).group is None


def test_dropping_takes_all_agents_of_an_episode(make):
    members = tuple(make.samples("a-0", agent=agent, versions=(version,)) for agent, version in [("x", 4), ("y", 2)])
    aged = drop_over_age(group(*members), version=5, max_staleness=2)
    assert (aged.group, aged.dropped) == (None, members)


def test_samples_that_masking_empties_leave_their_member(make):
    old, young = (make.samples(f"e-{v}", versions=(v, v)).samples[0] for v in (1, 5))
    aged = mask_over_age(group(member(old, young)), version=6, max_staleness=1)
    assert aged.group is not None
    (kept,) = aged.group.members
    assert kept.samples == (young,) and kept.masked == 2


def test_members_without_a_token_left_stay_for_the_baseline(make):
    gone = make.samples("a-0", reward=0.5, versions=(1, 1))
    young = make.samples("a-1", versions=(1, 5))
    silent = make.samples("a-2", versions=())
    aged = mask_over_age(group(gone, young, silent), version=6, max_staleness=1)
    assert aged.dropped == () and aged.group is not None
    assert [(m.episode_id, m.num_sampled, m.masked) for m in aged.group.members] == [
        ("a-0", 0, 2),
        ("a-1", 1, 1),
        ("a-2", 0, 0),
    ]
    assert aged.group.members[0].samples == () and aged.group.members[0].reward == 0.5


def test_a_group_without_a_token_left_goes(make):
    members = (make.samples("a-0", versions=(1, 1)), make.samples("a-1", versions=(2,)))
    aged = mask_over_age(group(*members), version=6, max_staleness=1)
    assert (aged.group, aged.dropped) == (None, members)


def test_a_group_that_never_had_a_token_is_none_of_the_agings_business(make):
    silent = group(make.samples("a-0", versions=()))
    assert mask_over_age(silent, version=6, max_staleness=1).group == silent
    assert drop_over_age(silent, version=6, max_staleness=1).group == silent


VERSIONS = st.lists(st.integers(0, 9), min_size=0, max_size=6)


@given(st.lists(VERSIONS, min_size=1, max_size=5), st.integers(0, 12), st.integers(0, 4))
def test_masking_keeps_exactly_the_tokens_in_time(make, all_versions, version, bound):
    members = tuple(make.samples(f"a-{i}", versions=tuple(versions)) for i, versions in enumerate(all_versions))
    aged = mask_over_age(group(*members), version=version, max_staleness=bound)
    young = [sum(version - v <= bound for v in versions) for versions in all_versions]
    if aged.group is None:
        assert not any(young) and any(all_versions) and aged.dropped == members
        return
    assert aged.dropped == ()
    for before, after, count in zip(members, aged.group.members, young, strict=True):
        assert (after.num_sampled, after.masked) == (count, before.num_sampled - count)
        assert after.min_version is None or version - after.min_version <= bound
    again = mask_over_age(aged.group, version=version, max_staleness=bound)
    assert (again.group, again.dropped) == (aged.group, ())


def test_a_rollback_makes_what_later_versions_sampled_as_old_as_the_common_one():
    rebased = rebase_member(member(partial_rollout()), highest=5)
    assert rebased.samples[0].versions_T.tolist() == [-1, -1, 4, 4, 5, -1, 5, 5]
    unchanged = member(partial_rollout())
    assert rebase_member(unchanged, highest=7) is unchanged
