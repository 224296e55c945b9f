"""Generalised advantage estimation along a tree, by hand and by its limits."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.trainer.credit import TurnTree
from wingbeat.trainer.gae import Floats, tree_advantages


def _advantages(
    parents: Sequence[int],
    values: Sequence[Sequence[float]],
    *,
    rewards: Sequence[float] = (),
    penalties: Sequence[Sequence[float]] = (),
    terminal: float,
    gamma: float,
    lam: float,
) -> list[list[float]]:
    count = len(parents)
    tree = TurnTree(
        tuple(f"t{place}" for place in range(count)), tuple(parents), tuple(rewards) or (0.0,) * count, terminal
    )
    values_N: list[Floats] = [np.asarray(found, np.float64) for found in values]
    penalties_N = [np.asarray(found) for found in penalties] or [np.zeros(len(found)) for found in values]
    return [found.tolist() for found in tree_advantages(tree, values_N, penalties_N, gamma=gamma, lam=lam)]


def test_two_tokens_by_hand() -> None:
    """The last: 3 - 2.  The first: 0.5 * 2 - 1 + 0.5 * 0.5 * 1."""
    assert _advantages([-1], [[1, 2]], terminal=3, gamma=0.5, lam=0.5) == [[0.25, 1]]


def test_a_turn_s_reward_comes_at_its_last_token_and_a_penalty_at_its_own() -> None:
    """Turns of two tokens and one, values 0, lambda and gamma 1: what is still to come."""
    found = _advantages(
        [-1, 0],
        [[0, 0], [0]],
        rewards=[4, 2],
        penalties=[[0.5, 0.25], [0.125]],
        terminal=1,
        gamma=1,
        lam=1,
    )
    assert found == [[7 - 0.875, 7 - 0.375], [3 - 0.125]]
    assert _advantages([-1, 0], [[0, 0], [0]], rewards=[4, 2], terminal=1, gamma=1, lam=0) == [[0, 4], [3]]


def test_a_fork_averages_what_comes_after() -> None:
    """Ends: 3 - 2 = 1 and 2 + 3 - 4 = 1, worth 0.5 * (2 + 0.5) = 1.25 and 0.5 * (4 + 0.5) = 2.25 to the root,
    which earned 1: 1 + 1.75 - 1."""
    found = _advantages([-1, 0, 0], [[1], [2], [4]], rewards=[1, 0, 2], terminal=3, gamma=0.5, lam=0.5)
    assert found == [[1.75], [1], [1]]


def test_a_turn_without_trained_tokens_passes_on_what_comes_after_it() -> None:
    with_gap = _advantages([-1, 0, 1], [[1, 2], [], [3]], rewards=[0, 5, 0], terminal=1, gamma=0.9, lam=0.8)
    without = _advantages([-1, 0], [[1, 2], [3]], rewards=[5, 0], terminal=1, gamma=0.9, lam=0.8)
    assert with_gap == [without[0], [], without[1]]


TREES = st.lists(st.integers(-1, 5), min_size=1, max_size=6).map(
    lambda found: [min(parent, place - 1) for place, parent in enumerate(found)]
)


@given(parents=TREES, seed=st.integers(0, 999), gamma=st.floats(0.2, 1))
def test_lambda_one_is_the_discounted_return_minus_the_value(parents: list[int], seed: int, gamma: float) -> None:
    """At any place of any tree, whatever the values."""
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=int(rng.integers(0, 4))).tolist() for _ in parents]
    penalties = [rng.normal(size=len(found)).tolist() for found in values]
    rewards = rng.normal(size=len(parents)).tolist()

    def to_come(place: int, token: int) -> float:
        if token == len(values[place]):
            below = [child for child, parent in enumerate(parents) if parent == place]
            return rewards[place] + (fmean(entered(child) for child in below) if below else 1.5)
        last = token + 1 == len(values[place])
        return (1 if last else gamma) * to_come(place, token + 1) - penalties[place][token]

    def entered(place: int) -> float:
        return (gamma if values[place] else 1) * to_come(place, 0)

    found = _advantages(parents, values, rewards=rewards, penalties=penalties, terminal=1.5, gamma=gamma, lam=1)
    for place, advantages in enumerate(found):
        for token, advantage in enumerate(advantages):
            assert advantage == pytest.approx(to_come(place, token) - values[place][token], abs=1e-9)


@given(parents=TREES, seed=st.integers(0, 999), lam=st.floats(0, 1))
def test_true_values_leave_no_advantage(parents: list[int], seed: int, lam: float) -> None:
    """Along a path: where each value is what will come, nothing is better than expected."""
    rng = np.random.default_rng(seed)
    path = list(range(-1, len(parents) - 1))
    rewards = rng.normal(size=len(path))
    values = [[float(rewards[place:].sum() + 2)] * 3 for place in range(len(path))]
    for found in _advantages(path, values, rewards=rewards.tolist(), terminal=2, gamma=1, lam=lam):
        assert found == pytest.approx([0] * 3, abs=1e-9)
