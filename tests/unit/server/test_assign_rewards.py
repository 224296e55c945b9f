"""Who earned what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import InvalidReward
from wingbeat.core.protocol import Rewards
from wingbeat.server.episodes.rewards import Credit, assign_rewards, uncalled_policies

CREDIT = Credit(
    agents=[("solver", ""), ("solver", "critic"), ("judge", "")],
    turns={"t1": ("solver", ""), "t2": ("solver", "critic"), "t3": ("solver", "critic")},
    policies=["solver", "judge", "idle"],
)


def test_a_number_goes_to_every_agent() -> None:
    expected = {("solver", ""): 0.5, ("solver", "critic"): 0.5, ("judge", ""): 0.5}
    assert assign_rewards(0.5, CREDIT, required=["solver", "judge"]) == expected


def test_an_agent_overrides_its_policy_and_turns_add() -> None:
    rewards = Rewards(
        policies={"solver": 1.0, "idle": 9.0}, agents={"solver:critic": -1.0}, turns={"t1": 0.25, "t2": 0.5, "t3": 2.0}
    )
    assert assign_rewards(rewards, CREDIT, required=["solver"]) == {("solver", ""): 1.25, ("solver", "critic"): 1.5}


def test_a_turn_alone_is_a_reward_and_zero_is_not_absence() -> None:
    rewards = Rewards(agents={"solver": 0.0, "judge": 0}, turns={"t2": 3.0})
    assigned = assign_rewards(rewards, CREDIT, required=["solver", "judge"])
    assert assigned == {("solver", ""): 0.0, ("solver", "critic"): 3.0, ("judge", ""): 0.0}


def test_a_policy_that_trains_must_be_rewarded() -> None:
    with pytest.raises(InvalidReward, match=r"rewards\.policies\['judge'\]"):
        assign_rewards(Rewards(policies={"solver": 1.0}), CREDIT, required=["solver", "judge"])


def test_an_agent_without_a_reward_is_named_with_both_places_for_one() -> None:
    told = r"agent 'solver:critic' .* set rewards\.agents\['solver:critic'\] or rewards\.policies\['solver'\]"
    with pytest.raises(InvalidReward, match=told):
        assign_rewards(Rewards(agents={"solver": 1.0}), CREDIT, required=["solver"])


def test_a_misspelt_name_is_told_what_it_may_mean() -> None:
    with pytest.raises(InvalidReward, match=r"names 'slover', .*; did you mean 'solver'\? it has \['idle', 'judge'"):
        assign_rewards(Rewards(policies={"slover": 1.0}), CREDIT, required=[])
    with pytest.raises(InvalidReward, match=r"does not have; it has \["):
        assign_rewards(Rewards(policies={"xyz": 1.0}), CREDIT, required=[])


@pytest.mark.parametrize(
    ("field", "name"), [("policies", "nobody"), ("agents", "solver:nobody"), ("agents", "idle"), ("turns", "t9")]
)
def test_unknown_names_are_refused_by_field(field: str, name: str) -> None:
    with pytest.raises(InvalidReward, match=name) as error:
        assign_rewards(Rewards(**{field: {name: 1.0}}), CREDIT, required=[])
    assert error.value.param == f"rewards.{field}"


def test_an_episode_without_turns_needs_no_reward() -> None:
    nobody = Credit(agents=[], turns={}, policies=["solver"])
    assert assign_rewards(Rewards(), nobody, required=["solver"]) == {}
    assert assign_rewards(1.0, nobody, required=["solver"]) == {}


def test_a_policy_without_turns_may_be_rewarded_and_is_named() -> None:
    rewards = Rewards(policies={"solver": 1.0, "judge": 0.0, "idle": 9.0})
    assert ("idle", "") not in assign_rewards(rewards, CREDIT, required=["solver", "idle"])
    assert uncalled_policies(rewards, CREDIT) == ["idle"]
    assert uncalled_policies(1.0, CREDIT) == []


NUMBERS = st.integers(-8, 8).map(lambda eighths: eighths / 8)


@given(
    policies=st.dictionaries(st.sampled_from(["solver", "judge", "idle"]), NUMBERS),
    agents=st.dictionaries(st.sampled_from(["solver", "solver:critic", "judge"]), NUMBERS),
    turns=st.dictionaries(st.sampled_from(["t1", "t2", "t3"]), NUMBERS),
)
def test_every_number_reaches_who_earned_it(
    policies: dict[str, float], agents: dict[str, float], turns: dict[str, float]
) -> None:
    """An agent gets its own number, else its policy's, plus those of its turns; what reaches nobody is named."""
    rewards = Rewards(policies=policies, agents=agents, turns=turns)
    assigned = assign_rewards(rewards, CREDIT, required=[])
    for policy, agent in CREDIT.agents:
        own = agents.get(f"{policy}:{agent}" if agent else policy, policies.get(policy))
        earned = [reward for turn, reward in turns.items() if CREDIT.turns[turn] == (policy, agent)]
        expected = None if own is None and not earned else (own or 0.0) + sum(earned)
        assert assigned.get((policy, agent)) == expected
    assert set(assigned) <= set(CREDIT.agents)
    assert uncalled_policies(rewards, CREDIT) == sorted({"idle"} & set(policies))
