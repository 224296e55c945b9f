"""Advantages by hand, and the properties every baseline must have."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.config.trainer import Algorithm
from wingbeat.core.errors import InvalidReward
from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.trainer.advantages import compute_advantages, estimate, shuffled_order

STANDARDISED: list[Algorithm] = ["grpo", "dapo", "cispo", "gspo", "sapo", "m2po", "decoupled_ppo"]
WITH_BASELINE: list[Algorithm] = ["rloo", "dr_grpo", "maxrl", "reinforce_plus_plus", *STANDARDISED]


def _samples(count: int) -> tuple[TrainingSample, ...]:
    return tuple(
        TrainingSample.build(
            f"s{index}",
            token_ids=np.array([1, 2], np.int32),
            sampled=np.array([0, 1], np.uint8),
            sampling_logprobs=np.array([0, -1], np.float32),
            versions=np.array([-1, 0], np.int32),
        )
        for index in range(count)
    )


def _episodes(
    rewards: Sequence[float], *, group: str = "g", agent: str = "", policy: str = "p", rows: Sequence[int] = ()
) -> list[EpisodeSamples]:
    return [
        EpisodeSamples(
            episode_id=f"{group}{agent}{index}",
            attempt=1,
            group_id=group,
            policy=policy,
            agent=agent,
            reward=reward,
            samples=_samples(rows[index] if rows else 1),
        )
        for index, reward in enumerate(rewards)
    ]


def _advantages(episodes: Sequence[EpisodeSamples], algorithm: Algorithm, eps: float = 1e-4) -> list[float]:
    return compute_advantages(episodes, algorithm=algorithm, eps=eps)


@pytest.mark.parametrize(
    ("algorithm", "high"),
    [
        ("dr_grpo", 0.5),
        ("rloo", 2 / 3),
        ("maxrl", 1.0),
        *((algorithm, 0.5 / (math.sqrt(1 / 3) + 1e-4)) for algorithm in STANDARDISED),
        ("reinforce_plus_plus", 0.5 / (0.5 + 1e-4)),
    ],
)
def test_episodes_with_more_rows_do_not_outvote(algorithm: Algorithm, high: float) -> None:
    """Rewards 1,0,1,0 in 2,1,2,1 rows: the baseline is 0.5, not 4/6."""
    found = _advantages(_episodes([1, 0, 1, 0], rows=[2, 1, 2, 1]), algorithm)
    assert found == pytest.approx([high, -high, high, -high], abs=1e-12)


def test_two_members_leave_one_out() -> None:
    assert _advantages(_episodes([1.0, 0.0]), "rloo") == [1.0, -1.0]


def test_reinforce_is_the_reward() -> None:
    assert _advantages(_episodes([0.25, -3, 7]), "reinforce") == [0.25, -3, 7]


def test_reinforce_plus_plus_compares_with_the_whole_batch() -> None:
    """Two constant groups: nothing to learn within a group, +-1 / (1 + eps) between them; each agent by itself."""
    episodes = [*_episodes([2, 2], group="a"), *_episodes([0, 0], group="b"), *_episodes([5, 9], agent="critic")]
    found = _advantages(episodes, "reinforce_plus_plus", eps=0.25)
    assert found == pytest.approx([0.8, 0.8, -0.8, -0.8, -2 / 2.25, 2 / 2.25])


def test_maxrl_weighs_rare_successes_more() -> None:
    """(r - mean) / mean: one of four gains 3, three of four gain 1/3 each; none of four teach nothing."""
    assert _advantages(_episodes([1, 0, 0, 0]), "maxrl") == [3, -1, -1, -1]
    assert _advantages(_episodes([1, 1, 1, 0]), "maxrl") == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
    assert _advantages(_episodes([0, 0, 0]), "maxrl") == [0, 0, 0]


def test_maxrl_refuses_rewards_below_zero() -> None:
    """Their mean could be negative, and would turn every sign around."""
    with pytest.raises(InvalidReward, match="at least 0, got -1"):
        _advantages(_episodes([1, -1]), "maxrl")


def test_shaping_counts() -> None:
    episodes = [msgspec.structs.replace(episode, shaping=-0.5 * i) for i, episode in enumerate(_episodes([1, 1]))]
    assert _advantages(episodes, "dr_grpo") == [0.25, -0.25]


def test_a_member_that_votes_with_several_values_has_one_vote() -> None:
    """Votes (4, 0) and 1: mean (2 + 1) / 2; variance ((2.5^2 + 1.5^2) / 2 + 0.5^2) / (2 - 1)."""
    votes = [[4.0, 0.0], [1.0]]
    assert estimate(votes, algorithm="dr_grpo", eps=1) == [[2.5, -1.5], [-0.5]]
    assert estimate(votes, algorithm="rloo", eps=1) == [[3, -1], [-1]]
    std = math.sqrt(4.5)
    (first, second), (third,) = estimate(votes, algorithm="grpo", eps=0.5)
    assert [first, second, third] == pytest.approx([2.5 / (std + 0.5), -1.5 / (std + 0.5), -0.5 / (std + 0.5)])


@pytest.mark.parametrize("algorithm", WITH_BASELINE)
def test_one_member_s_own_values_are_no_baseline(algorithm: Algorithm) -> None:
    assert estimate([[1.0, 0.0]], algorithm=algorithm, eps=1e-4) == [[0.0, 0.0]]


def test_groups_of_unequal_size_with_one_constant() -> None:
    """Groups of 4, 3 and 4; the three all score 5: exact zeros, not -1.09 from a mixed-up reshape."""
    episodes = [
        *_episodes([1, 2, 3, 4], group="a"),
        *_episodes([5, 5, 5], group="b"),
        *_episodes([0, 0, 0, 8], group="c"),
    ]
    assert _advantages(episodes, "grpo")[4:7] == [0.0, 0.0, 0.0]
    assert _advantages(episodes, "dr_grpo") == [-1.5, -0.5, 0.5, 1.5, 0, 0, 0, -2, -2, -2, 6]
    assert _advantages(episodes, "rloo")[7:] == pytest.approx([-8 / 3, -8 / 3, -8 / 3, 8])


@pytest.mark.parametrize("algorithm", WITH_BASELINE)
def test_equal_rewards_leave_no_rounding_residue(algorithm: Algorithm) -> None:
    assert _advantages(_episodes([0.1] * 3), algorithm) == [0.0] * 3


@pytest.mark.parametrize("algorithm", WITH_BASELINE)
def test_a_single_member_carries_no_information(algorithm: Algorithm) -> None:
    assert _advantages(_episodes([7.0]), algorithm) == [0.0]


def test_agents_and_policies_have_their_own_baselines() -> None:
    episodes = [
        *_episodes([1, 0], agent="solver"),
        *_episodes([10, 20], agent="critic"),
        *_episodes([100, 300], agent="solver", policy="other"),
    ]
    assert _advantages(episodes, "dr_grpo") == [0.5, -0.5, -5, 5, -100, 100]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(InvalidReward, match="'g1'"):
        _advantages(_episodes([1.0, reward]), "grpo")


def test_shuffled_control_deals_each_episode_once() -> None:
    order = shuffled_order(20, seed=4)
    assert order != list(range(20))
    assert sorted(order) == list(range(20))
    assert order == shuffled_order(20, seed=4)
    assert order != shuffled_order(20, seed=5)


@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12),
    algorithm=st.sampled_from(WITH_BASELINE),
    seed=st.integers(0, 1000),
)
def test_baselines_sum_to_zero_and_ignore_order(rewards: list[float], algorithm: Algorithm, seed: int) -> None:
    episodes = _episodes([abs(reward) for reward in rewards] if algorithm == "maxrl" else rewards)
    found = _advantages(episodes, algorithm)
    assert sum(found) == pytest.approx(0, abs=1e-8)
    order = list(range(len(rewards)))
    random.Random(seed).shuffle(order)
    again = _advantages([episodes[index] for index in order], algorithm)
    assert again == pytest.approx([found[index] for index in order], rel=1e-9, abs=1e-9)
