"""Credit per turn by hand: returns along the tree, baselines per depth, groups of equal states."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.config.trainer import Algorithm, TrainerConfig
from wingbeat.core.errors import RequestError
from wingbeat.core.samples import EpisodeSamples, TurnCredit
from wingbeat.trainer.advantages import compute_advantages
from wingbeat.trainer.credit import TurnTree, step_advantages, turn_advantages

FORK = (-1, 0, 0, 1)
"""t0 is continued by t1 and t2, t1 by t3."""


def _episode(
    parents: Sequence[int], rewards: Sequence[float], *, reward: float, states: Sequence[str] = (), **facts: Any
) -> EpisodeSamples:
    turns = tuple(
        TurnCredit(f"t{place}", f"t{parent}" if parent >= 0 else "", rewards[place], states[place] if states else "")
        for place, parent in enumerate(parents)
    )
    known = {"episode_id": "e", "attempt": 1, "group_id": "g", "policy": "p", "agent": "", "samples": ()}
    return EpisodeSamples(**(known | facts), reward=reward, turns=turns)


def _turn(episodes: Sequence[EpisodeSamples], **settings: Any) -> list[list[float]]:
    config = TrainerConfig(credit="turn", **settings)
    found = turn_advantages(episodes, [TurnTree.of(episode) for episode in episodes], config=config)
    return [[by_turn[turn.turn_id] for turn in episode.turns] for by_turn, episode in zip(found, episodes, strict=True)]


def _steps(episodes: Sequence[EpisodeSamples], **settings: Any) -> list[list[float]]:
    config = TrainerConfig(credit="step_groups", **settings)
    found = step_advantages(episodes, [TurnTree.of(episode) for episode in episodes], config=config)
    return [[by_turn[turn.turn_id] for turn in episode.turns] for by_turn, episode in zip(found, episodes, strict=True)]


def test_returns_are_discounted_along_the_edges_and_averaged_at_forks() -> None:
    """Turns earned 1, 2, 4, 8; 16 comes at both ends.

    t3: 8 + 16 = 24.  t2: 4 + 16 = 20.  t1: 2 + 24 / 2 = 14.  t0: 1 + (14 + 20) / 2 / 2 = 9.5.
    """
    tree = TurnTree.of(_episode(FORK, (1, 2, 4, 8), reward=31))
    assert (tree.terminal, tree.depths()) == (16, [0, 1, 1, 2])
    assert tree.returns(gamma=0.5) == [9.5, 14, 20, 24]


def test_shaping_comes_at_the_ends() -> None:
    tree = TurnTree.of(_episode((-1, 0), (1, 0), reward=3, shaping=-0.5))
    assert tree.returns(gamma=1) == [2.5, 1.5]


def test_penalties_come_at_their_turn() -> None:
    tree = TurnTree.of(_episode((-1, 0), (1, 0), reward=3), penalties={"t1": 0.25})
    assert tree.returns(gamma=1) == [2.75, 1.75]


def test_a_parent_of_another_agent_makes_a_root() -> None:
    episode = _episode((-1, 0), (0, 0), reward=1)
    turns = (episode.turns[0], msgspec.structs.replace(episode.turns[1], parent_id="of someone else"))
    assert TurnTree.of(msgspec.structs.replace(episode, turns=turns)).parents == (-1, -1)


@pytest.mark.parametrize("turns", [("t1", "t0"), ("t0", "t0")])
def test_turns_out_of_order_are_refused(turns: tuple[str, str]) -> None:
    credits = tuple(TurnCredit(turn, "t0" if turn == "t1" else "") for turn in turns)
    episode = msgspec.structs.replace(_episode((), (), reward=1), turns=credits)
    with pytest.raises(RequestError, match="each turn once and behind its parent"):
        TurnTree.of(episode)


WORKED = [_episode((-1, 0), (1, 0), reward=1), _episode((-1, 0), (0, 0), reward=1, episode_id="f")]
"""That of the module: G = (1, 0) and (0.5, 1) at gamma 0.5."""


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ("dr_grpo", [[0.25, -0.5], [-0.25, 0.5]]),
        ("rloo", [[0.5, -1.0], [-0.5, 1.0]]),
        # Deviations 0.25 sqrt(2) and 0.5 sqrt(2).
        ("grpo", [[0.25 / (0.125**0.5 + 1), -0.5 / (0.5**0.5 + 1)], [-0.25 / (0.125**0.5 + 1), 0.5 / (0.5**0.5 + 1)]]),
        ("maxrl", [[0.25 / 0.75, -1.0], [-0.25 / 0.75, 1.0]]),
        ("reinforce", [[1.0, 0.0], [0.5, 1.0]]),
        ("reinforce_plus_plus", [[0.25 / 1.25, -0.5 / 1.5], [-0.25 / 1.25, 0.5 / 1.5]]),
    ],
)
def test_turns_are_compared_at_their_depth(algorithm: Algorithm, wanted: list[list[float]]) -> None:
    eps = {"advantage_eps": 1} if algorithm in ("grpo", "reinforce_plus_plus") else {}
    for found, expected in zip(_turn(WORKED, algorithm=algorithm, gamma=0.5, **eps), wanted, strict=True):
        assert found == pytest.approx(expected, abs=1e-12)


def test_an_episode_that_ended_votes_with_its_last_turn() -> None:
    """Lengths 3, 1: the second and third turn of the first are compared with the only one of the second."""
    episodes = [_episode((-1, 0, 1), (0, 1, 2), reward=3), _episode((-1,), (0,), reward=1, episode_id="f")]
    assert _turn(episodes, algorithm="dr_grpo") == [[1, 1, 0.5], [-1]]


def test_branches_share_the_vote_of_their_episode() -> None:
    """Returns 3 and 1 at depth 1 (mean 2) against 1: the baseline is 1.5, not 5 / 3."""
    episodes = [_episode((-1, 0, 0), (0, 2, 0), reward=3), _episode((-1, 0), (0, 0), reward=1, episode_id="f")]
    assert _turn(episodes, algorithm="dr_grpo") == [[0.5, 1.5, -0.5], [-0.5, -0.5]]


def test_groups_and_agents_have_their_own_baselines() -> None:
    episodes = [
        _episode((-1,), (0,), reward=reward, group_id=group, agent=agent)
        for group, agent, reward in [("g", "a", 1), ("g", "a", 0), ("g", "b", 9), ("g", "b", 5), ("h", "a", 7)]
    ]
    assert _turn(episodes, algorithm="dr_grpo") == [[0.5], [-0.5], [2], [-2], [0]]


TREES = st.lists(st.integers(-1, 5), min_size=1, max_size=6).map(
    lambda found: [min(parent, place - 1) for place, parent in enumerate(found)]
)


@given(
    trees=st.lists(st.tuples(TREES, st.integers(-8, 8)), min_size=1, max_size=6),
    algorithm=st.sampled_from(["grpo", "rloo", "dr_grpo", "reinforce", "reinforce_plus_plus"]),
)
def test_without_turn_rewards_and_discount_it_is_the_episode_s_advantage(
    trees: list[tuple[list[int], int]], algorithm: Any
) -> None:
    """Whatever the lengths and forks."""
    episodes = [
        _episode(parents, [0.0] * len(parents), reward=reward, episode_id=f"e{place}")
        for place, (parents, reward) in enumerate(trees)
    ]
    wanted = compute_advantages(episodes, algorithm=algorithm, eps=1e-4)
    for found, advantage in zip(_turn(episodes, algorithm=algorithm), wanted, strict=True):
        assert found == pytest.approx([advantage] * len(found), rel=1e-12, abs=1e-12)


@given(parents=TREES, seed=st.integers(0, 99), gamma=st.floats(0.1, 1))
def test_a_root_s_return_is_that_of_a_random_path(parents: list[int], seed: int, gamma: float) -> None:
    """Discounted rewards along paths, each child as likely as the others."""
    rewards = np.random.default_rng(seed).normal(size=len(parents)).tolist()
    tree = TurnTree.of(_episode(parents, rewards, reward=2.0))

    def walk(place: int) -> float:
        below = [child for child, parent in enumerate(parents) if parent == place]
        return rewards[place] + (gamma * fmean(map(walk, below)) if below else 2.0 - sum(rewards))

    assert tree.returns(gamma=gamma)[0] == pytest.approx(walk(0), rel=1e-9, abs=1e-9)


def test_steps_that_saw_the_same_are_compared() -> None:
    """States: x in both episodes, y twice in the first, z in one only, none known at last.

    G at gamma 1: first 6, 5, 3, 3 (turn rewards 1, 2, 0, 3), second 4 (0 and 4 at the end).
    """
    first = _episode((-1, 0, 1, 2), (1, 2, 0, 3), reward=6, states=("x", "y", "y", "z"))
    second = _episode((-1, 0), (0, 0), reward=4, states=("x", ""), episode_id="f")
    assert _steps([first, second], algorithm="dr_grpo") == [[1, 1, -1, 0], [-1, 0]]
    assert _steps([first, second], algorithm="rloo") == [[2, 2, -2, 0], [-2, 0]]


def test_turns_of_unknown_state_are_compared_with_none() -> None:
    episodes = [_episode((-1,), (0,), reward=reward, states=("",), episode_id=f"e{reward}") for reward in (1, 0)]
    assert _steps(episodes, algorithm="dr_grpo") == [[0], [0]]


def test_equal_states_of_other_groups_are_not_compared() -> None:
    episodes = [
        _episode((-1,), (0,), reward=reward, states=("x",), group_id=group) for reward, group in [(1, "g"), (0, "h")]
    ]
    assert _steps(episodes, algorithm="dr_grpo") == [[0], [0]]


def test_every_step_has_a_vote() -> None:
    """GiGPO: three turns saw x, two of them in one episode; G 2, 1 and 0."""
    first = _episode((-1, 0), (1, 1), reward=2, states=("x", "x"))
    second = _episode((-1,), (0,), reward=0, states=("x",), episode_id="f")
    assert _steps([first, second], algorithm="grpo", advantage_eps=1) == [[0.5, 0], [-0.5]]
