"""From rewards to one advantage per trained token: by episode, turn, state, and critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import InvalidReward, RequestError
from wingbeat.core.samples import EpisodeSamples
from wingbeat.trainer.assignment import Assigned, Evidence, assign_credit
from wingbeat.trainer.rows import Row, build_rows

MakeEpisode = Callable[..., EpisodeSamples]
FORK = (-1, 0, 0, 1)


def _assign(
    episodes: Sequence[EpisodeSamples],
    *,
    values: Callable[[Row], list[float]] | None = None,
    penalties: Callable[[Row], list[float]] | None = None,
    seed: int = 0,
    **settings: Any,
) -> tuple[Assigned, list[Row]]:
    rows = build_rows(episodes, vocabulary=48)
    evidence = Evidence(
        values_N=[np.asarray(values(row), np.float64) for row in rows] if values else (),
        penalties_N=[np.asarray(penalties(row), np.float64) for row in rows] if penalties else None,
    )
    return assign_credit(episodes, rows, config=TrainerConfig(**settings), evidence=evidence, seed=seed), rows


def _by_row(found: Assigned) -> list[list[float]]:
    return [advantages.tolist() for advantages in found.advantages_N]


@pytest.fixture
def pair(make_episode: MakeEpisode) -> list[EpisodeSamples]:
    """A fork in four turns of 1, 2, 3, 1 tokens, which earned 0, 1, 3, 0; and one turn of two tokens."""
    rng = np.random.default_rng(0)
    return [
        make_episode(rng, FORK, lengths=(1, 2, 3, 1), rewards=(0, 1, 3, 0), states=("x", "y", "y", "z")),
        make_episode(rng, (-1,), rewards=(1,), states=("x",), episode_id="f"),
    ]


def test_an_episode_s_advantage_goes_to_all_of_its_tokens(pair: list[EpisodeSamples]) -> None:
    found, _ = _assign(pair, algorithm="dr_grpo")
    assert _by_row(found) == [[1.5] * 4, [1.5] * 3, [-1.5] * 2]
    assert found.episodes == [1.5, -1.5]
    assert found.returns_N == []


def test_each_token_gets_the_advantage_of_its_own_turn(pair: list[EpisodeSamples]) -> None:
    """Returns t0 2, t1 1, t2 3, t3 0, against 1 in the other: by depth 2 - 1.5; 1 and 3 - (2 + 1) / 2; 0 - 0.5.

    The first sample trains t0 and t2, the second t1 and t3.
    """
    found, _ = _assign(pair, algorithm="dr_grpo", credit="turn")
    assert _by_row(found) == [[0.5, 1.5, 1.5, 1.5], [-0.5, -0.5, -0.5], [-0.5, -0.5]]
    assert found.episodes == pytest.approx([(0.5 + 4.5 - 1.5) / 7, -0.5])


def test_step_groups_add_to_the_episode_s_advantage(pair: list[EpisodeSamples]) -> None:
    """x: 2 against 1; y: t1's 1 against t2's 3; z alone.  Half of it, on top of 1.5 and -1.5."""
    found, _ = _assign(pair, algorithm="dr_grpo", credit="step_groups", step_weight=0.5)
    assert _by_row(found) == [[1.75, 2, 2, 2], [1, 1, 1.5], [-1.75, -1.75]]


def test_ppo_standardises_over_all_tokens(pair: list[EpisodeSamples]) -> None:
    """Values 0, lambda and gamma 1: a token's advantage is what is still to come, which is what values fit."""
    found, _ = _assign(pair, algorithm="ppo", gae_lambda=1, advantage_eps=1, values=lambda row: [0.0] * row.num_trained)
    returns = [[2, 3, 3, 3], [1, 1, 0], [1, 1]]
    assert [values.tolist() for values in found.returns_N] == returns
    flat = np.concatenate(returns)
    for advantages, wanted in zip(_by_row(found), returns, strict=True):
        assert advantages == pytest.approx(((np.asarray(wanted) - flat.mean()) / (flat.std() + 1)).tolist())


def _nameless(episode: EpisodeSamples) -> EpisodeSamples:
    samples = tuple(msgspec.structs.replace(sample, turn_ids=(), turn_starts=()) for sample in episode.samples)
    return msgspec.structs.replace(episode, turns=(), samples=samples)


def test_ppo_without_turns_has_each_sample_as_a_path(pair: list[EpisodeSamples]) -> None:
    old = [_nameless(episode) for episode in pair]
    found, _ = _assign(old, algorithm="ppo", gamma=0.5, gae_lambda=1, values=lambda row: [0.0] * row.num_trained)
    assert [values.tolist() for values in found.returns_N] == [[0.5, 1, 2, 4], [1, 2, 4], [0.5, 1]]


def test_ppo_fits_values_to_returns_before_they_are_standardised(pair: list[EpisodeSamples]) -> None:
    """At lambda 0 the target of a token is the value of the next one, and at the end the reward."""
    found, _ = _assign(pair, algorithm="ppo", gae_lambda=0, values=lambda row: list(range(row.num_trained)))
    assert found.returns_N[2].tolist() == [1, 1]


@pytest.mark.parametrize("rules", [{"credit": "turn"}, {"credit": "step_groups"}, {"algorithm": "ppo"}])
def test_samples_without_turns_are_refused_where_turns_are_needed(
    rules: dict[str, Any], pair: list[EpisodeSamples]
) -> None:
    old = [msgspec.structs.replace(episode, turns=()) for episode in pair]
    with pytest.raises(RequestError, match="earlier release"):
        _assign(old, **rules, values=lambda row: [0.0] * row.num_trained)


def test_samples_without_turn_starts_are_refused(pair: list[EpisodeSamples]) -> None:
    samples = tuple(msgspec.structs.replace(sample, turn_starts=()) for sample in pair[0].samples)
    with pytest.raises(RequestError, match=r"'e'.*earlier release"):
        _assign([msgspec.structs.replace(pair[0], samples=samples)], credit="turn")


def test_a_turn_that_trains_in_two_samples_is_refused(pair: list[EpisodeSamples]) -> None:
    twice = msgspec.structs.replace(pair[1], samples=pair[1].samples * 2)
    with pytest.raises(RequestError, match="expected each turn to train in one sample, got 't0' in two"):
        _assign([pair[0], twice], credit="turn")


@pytest.mark.parametrize(
    "rules",
    [{}, {"credit": "turn"}, {"credit": "step_groups"}, {"algorithm": "ppo"}, {"algorithm": "sft"}],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_named(bad: float, rules: dict[str, Any], pair: list[EpisodeSamples]) -> None:
    """It would train as NaN, and be taken for a policy that diverged."""
    shaped = msgspec.structs.replace(pair[0], shaping=bad)
    turn = msgspec.structs.replace(pair[1], turns=(msgspec.structs.replace(pair[1].turns[0], reward=bad),))
    for episodes in ([shaped, pair[1]], [pair[0], turn]):
        with pytest.raises(InvalidReward, match="expected finite rewards"):
            _assign(episodes, **rules, values=lambda row: [0.0] * row.num_trained)


def test_penalties_lower_the_reward_before_the_baseline(pair: list[EpisodeSamples]) -> None:
    """4 - 7 * 0.25 against 1 - 2 * 0.25."""
    found, _ = _assign(pair, algorithm="dr_grpo", penalties=lambda row: [0.25] * row.num_trained)
    assert found.episodes == [0.875, -0.875]


def test_penalties_lower_the_return_of_their_turn(pair: list[EpisodeSamples]) -> None:
    """t3: 0 - 0.25, t2: 3 - 0.75, t1: 1 - 0.5 - 0.25, t0: (0.25 + 2.25) / 2 - 0.25 = 1; the other 1 - 0.5."""
    found, _ = _assign(pair, algorithm="reinforce", credit="turn", penalties=lambda row: [0.25] * row.num_trained)
    assert _by_row(found) == [[1, 2.25, 2.25, 2.25], [0.25, 0.25, -0.25], [0.5, 0.5]]


def test_penalties_come_at_their_tokens_for_ppo(pair: list[EpisodeSamples]) -> None:
    found, _ = _assign(
        pair,
        algorithm="ppo",
        gae_lambda=1,
        values=lambda row: [0.0] * row.num_trained,
        penalties=lambda row: [0.25] * row.num_trained,
    )
    assert found.returns_N[2].tolist() == [0.5, 0.75]


def test_sft_shows_which_episodes_it_trains(pair: list[EpisodeSamples]) -> None:
    assert _assign(pair, algorithm="sft", sft_min_reward=2)[0].episodes == [1, 0]


@pytest.mark.parametrize(
    "rules",
    [{}, {"credit": "turn", "gamma": 0.9}, {"credit": "step_groups"}, {"algorithm": "ppo"}, {"algorithm": "maxrl"}],
)
@settings(max_examples=25)
@given(order=st.permutations(range(6)), seed=st.integers(0, 20))
def test_the_order_of_episodes_changes_nothing(
    rules: dict[str, Any], order: list[int], seed: int, make_episode: MakeEpisode
) -> None:
    rng = np.random.default_rng(seed)
    episodes = [
        make_episode(
            rng,
            FORK[: int(rng.integers(1, 5))],
            lengths=rng.integers(1, 4, 4).tolist(),
            rewards=rng.random(4).tolist(),
            states=list("xyxz"),
            episode_id=f"e{index}",
            group_id=f"g{index % 2}",
            reward=float(rng.random()),
        )
        for index in range(6)
    ]

    def by_sample(chosen: Sequence[EpisodeSamples]) -> dict[tuple[int, ...], list[float]]:
        found, rows = _assign(chosen, values=lambda row: np.sin(row.targets_N).tolist(), **rules)
        return {tuple(row.token_ids_T): found.advantages_N[row.index].tolist() for row in rows}

    wanted, again = by_sample(episodes), by_sample([episodes[index] for index in order])
    assert wanted.keys() == again.keys()
    for tokens, advantages in again.items():
        assert advantages == pytest.approx(wanted[tokens], rel=1e-12, abs=1e-12)


def test_the_control_deals_whole_episodes(make_episode: MakeEpisode) -> None:
    rng = np.random.default_rng(1)
    lengths = [(1, 1), (2, 2), (4, 4), (3, 1), (1, 3)]
    episodes = [
        make_episode(rng, (-1, 0), lengths=found, rewards=(index, 2 * index), episode_id=f"e{index}")
        for index, found in enumerate(lengths)
    ]
    real, _ = _assign(episodes, algorithm="dr_grpo", credit="turn")
    dealt, _ = _assign(episodes, algorithm="dr_grpo", credit="turn", control="shuffled_advantages", seed=3)
    again, _ = _assign(episodes, algorithm="dr_grpo", credit="turn", control="shuffled_advantages", seed=3)
    assert _by_row(dealt) == _by_row(again) != _by_row(real)
    order = [real.episodes.index(value) for value in dealt.episodes]
    assert sorted(order) == list(range(5))
    for index, donor in enumerate(order):
        given_to, taken_from = dealt.advantages_N[index], real.advantages_N[donor]
        places = np.arange(len(given_to)) * len(taken_from) // len(given_to)
        assert given_to.tolist() == taken_from[places].tolist()


def test_the_control_deals_also_what_has_no_tokens(make_episode: MakeEpisode) -> None:
    rng = np.random.default_rng(1)
    episodes = [make_episode(rng, (-1,), reward=float(index), episode_id=f"e{index}") for index in range(5)]
    episodes[2] = msgspec.structs.replace(episodes[2], samples=())
    real, _ = _assign(episodes, algorithm="rloo")
    orders = set()
    for seed in range(8):
        dealt, rows = _assign(episodes, algorithm="rloo", control="shuffled_advantages", seed=seed)
        assert sorted(dealt.episodes) == sorted(real.episodes)
        assert _by_row(dealt) == [[dealt.episodes[row.episode]] * 2 for row in rows]
        orders.add(tuple(dealt.episodes))
    assert len(orders) > 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "reinforce", "credit": "step_groups"}, "no baseline per group"),
        ({"algorithm": "reinforce_plus_plus", "credit": "step_groups"}, "no baseline per group"),
        ({"algorithm": "ppo", "credit": "turn"}, "leave credit unset"),
        ({"algorithm": "sft", "credit": "turn"}, "trains without"),
        ({"algorithm": "maxrl", "kl_coef": 0.1, "kl_in": "reward"}, "divides by the mean reward"),
        ({"gamma": 0.9}, "gamma discounts turns"),
        ({"credit": "turn", "step_weight": 0.5}, "step_weight is of"),
        ({"critic": {}}, "critic is of ppo"),
        ({"gae_lambda": 0.9}, "gae_lambda is of ppo"),
        ({"algorithm": "ppo", "critic": {"value_clip": 0}}, "value_clip"),
    ],
)
def test_keys_that_would_change_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**settings)
