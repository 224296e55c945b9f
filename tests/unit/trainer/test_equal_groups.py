"""What the dataflow calls a group of equal rewards has nothing to teach: every advantage of the trainer is 0."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.config import TrainerConfig
from wingbeat.core.samples import EpisodeSamples, TurnCredit
from wingbeat.dataflow.operators import VarianceRule
from wingbeat.trainer.credit import TurnTree, step_advantages, turn_advantages

pytestmark = pytest.mark.unit

Credit = Literal["turn", "step_groups"]


@st.composite
def members(draw: st.DrawFn) -> tuple[EpisodeSamples, ...]:
    """Up to three episodes with small forests of turns, often alike."""
    found: list[EpisodeSamples] = []
    for index in range(draw(st.integers(1, 3))):
        turns: list[TurnCredit] = []
        for place in range(draw(st.integers(1, 3))):
            parent = draw(st.sampled_from(["", *(turn.turn_id for turn in turns)]))
            reward = draw(st.sampled_from([0.0, 0.0, 0.0, 0.5]))
            turns.append(TurnCredit(f"{index}-{place}", parent, reward, draw(st.sampled_from(["a", "b"]))))
        reward = draw(st.sampled_from([0.0, 1.0, 1.0]))
        found.append(EpisodeSamples(f"e{index}", 1, "g", "solver", "", reward, (), turns=tuple(turns)))
    return tuple(found)


@given(
    members(),
    st.sampled_from(["turn", "step_groups"]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from(["grpo", "rloo", "dr_grpo"]),
)
def test_groups_that_count_as_equal_have_no_advantage(
    group: tuple[EpisodeSamples, ...], credit: Credit, gamma: float, algorithm: Any
) -> None:
    if not VarianceRule(credit, gamma).is_equal(group):
        return
    config = TrainerConfig(algorithm=algorithm, credit=credit, gamma=gamma)
    trees = [TurnTree.of(episode) for episode in group]
    compute = turn_advantages if credit == "turn" else step_advantages
    if algorithm == "rloo" and len(group) == 1:
        return  # nobody to leave out: its reward itself is the signal
    for values in compute(group, trees, config=config):
        assert all(abs(value) < 1e-6 for value in values.values())
