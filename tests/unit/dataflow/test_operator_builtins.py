"""What each built-in operator does, with numbers computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from wingbeat.core.config import Config
from wingbeat.core.errors import ConfigError
from wingbeat.core.samples import EpisodeSamples, TrainingSample, TurnCredit
from wingbeat.core.types import Task
from wingbeat.dataflow.operators import OperatorChain, VarianceRule, build_chain, has_zero_variance
from wingbeat.dataflow.operators.curriculum import DifficultyTarget, Greso
from wingbeat.dataflow.records import ReadyGroup

pytestmark = pytest.mark.unit

Chain = Callable[..., OperatorChain]


def configure(*operators: Mapping[str, Any], **dataflow: Any) -> Config:
    settings = {"group_size": 2, "groups_per_step": 4, "max_staleness": 2, **dataflow}
    algorithm = "reinforce" if settings["group_size"] == 1 else "grpo"
    solver = {"model": "m", "trainer": {"algorithm": algorithm}}
    return Config.model_validate(
        {"policies": {"solver": solver}, "dataflow": {**settings, "operators": list(operators)}}
    )


def chain_of(*operators: Mapping[str, Any], **dataflow: Any) -> OperatorChain:
    return build_chain(configure(*operators, **dataflow), "solver")


def member(
    index: int, reward: float, *, tokens: int = 2, group: str = "g", version: int = 0, agent: str = "", **more: Any
) -> EpisodeSamples:
    length = 1 + tokens
    sample = TrainingSample.build(
        f"{group}-{index}/{agent}",
        token_ids=np.arange(length, dtype=np.int32) + 100 * index,
        sampled=np.array([0, *[1] * tokens], np.uint8),
        sampling_logprobs=np.array([0, *[-0.5] * tokens], np.float32),
        versions=np.array([-1, *[version] * tokens], np.int32),
        turn_ids=("t",),
        turn_starts=(1,),
    )
    built = EpisodeSamples(f"{group}-{index}", 1, group, "solver", agent, reward, (sample,))
    return msgspec.structs.replace(built, **more)


def ready(
    *members: EpisodeSamples, size: int | None = None, task: str = "t1", metrics: Mapping[Any, Any] | None = None
) -> ReadyGroup:
    group_id = members[0].group_id
    return ReadyGroup(
        group_id,
        "solver",
        floor_version=0,
        size=len(members) if size is None else size,
        members=members,
        task=Task("src", task),
        metrics=metrics or {},
    )


def kept(chain: OperatorChain, group: ReadyGroup) -> list[str]:
    outcome = chain.on_group(group)
    return [] if outcome.group is None else [m.episode_id for m in outcome.group.members]


def reasons(chain: OperatorChain, group: ReadyGroup) -> dict[str, str]:
    return {dropped.episode_id: dropped.reason for dropped in chain.on_group(group).dropped}


def shaping(chain: OperatorChain, group: ReadyGroup) -> list[float]:
    outcome = chain.on_group(group)
    assert outcome.group is not None
    return [m.shaping for m in outcome.group.members]


# --- filters --------------------------------------------------------------------------------------


def test_failure_filter_drops_truncated_episodes_reported_failures_and_low_rewards() -> None:
    chain = chain_of({"use": "failure_filter", "metrics": ["crashed"], "min_reward": 0.0})
    group = ready(
        member(0, 1.0),
        member(1, 1.0, truncated=True),
        member(2, 1.0),
        member(3, -0.1),
        metrics={("g-2", 1): {"crashed": 1.0}, ("g-0", 1): {"crashed": 0.0}},
    )
    assert reasons(chain, group) == {
        "g-1": "failure_filter:truncated",
        "g-2": "failure_filter:metric_crashed",
        "g-3": "failure_filter:low_reward",
    }
    assert kept(chain, group) == ["g-0"]


def test_length_filter_bounds_tokens_and_turns() -> None:
    chain = chain_of({"use": "length_filter", "min_tokens": 2, "max_tokens": 3, "max_turns": 1})
    turns = (TurnCredit("a"), TurnCredit("b", "a"))
    group = ready(member(0, 1, tokens=1), member(1, 1, tokens=2), member(2, 1, tokens=4), member(3, 1, turns=turns))
    assert reasons(chain, group) == {
        "g-0": "length_filter:too_few_tokens",
        "g-2": "length_filter:too_many_tokens",
        "g-3": "length_filter:too_many_turns",
    }


def test_an_episode_stays_or_goes_with_all_its_agents() -> None:
    chain = chain_of({"use": "reward_filter", "min": 0.0})
    group = ready(member(0, 1.0, agent="a"), member(0, -1.0, agent="b"), member(1, 1.0, agent="a"), size=2)
    outcome = chain.on_group(group)
    assert outcome.group is not None
    assert [(m.episode_id, m.agent) for m in outcome.group.members] == [("g-1", "a")]
    assert [tuple(d) for d in outcome.dropped] == [("g-0", 1, "reward_filter:reward_too_low")]


def test_zero_variance_filter_drops_equal_groups_whole_and_passes_groups_of_one() -> None:
    chain = chain_of({"use": "zero_variance_filter"})
    assert kept(chain, ready(member(0, 1.0), member(1, 1.0))) == []
    assert kept(chain, ready(member(0, 1.0), member(1, 0.0))) == ["g-0", "g-1"]
    assert kept(chain, ready(member(0, 1.0), size=1)) == ["g-0"]  # its reward itself is the signal
    assert kept(chain, ready(member(0, 1.0), size=2)) == []  # the other one is missing: no baseline


def test_zero_variance_filter_sees_the_shaped_reward() -> None:
    group = ready(member(0, 3.0), member(1, 7.1))
    assert kept(chain_of({"use": "reward_clip", "max": 1.0}, {"use": "zero_variance_filter"}), group) == []
    assert kept(chain_of({"use": "zero_variance_filter"}, {"use": "reward_clip", "max": 1.0}), group) != []


@pytest.mark.parametrize("use", ["zero_variance_filter", "dynamic_sampling", "greso"])
def test_operators_that_compare_are_refused_for_groups_of_one(use: str) -> None:
    with pytest.raises(ConfigError, match=r"dataflow.operators\[0\].*group_size"):
        chain_of({"use": use}, group_size=1)


def test_dynamic_sampling_keeps_groups_with_some_but_not_only_successes() -> None:
    chain = chain_of({"use": "dynamic_sampling", "success": 0.9})
    assert reasons(chain, ready(member(0, 0.0), member(1, 0.8)))["g-0"] == "dynamic_sampling:too_hard"
    assert reasons(chain, ready(member(0, 0.9), member(1, 1.0)))["g-0"] == "dynamic_sampling:too_easy"
    assert kept(chain, ready(member(0, 0.0), member(1, 1.0))) == ["g-0", "g-1"]


def test_dynamic_sampling_bounds_are_exclusive() -> None:
    chain = chain_of({"use": "dynamic_sampling", "above": 0.25, "below": 0.75}, group_size=4)
    assert kept(chain, ready(*(member(i, float(i < 1)) for i in range(4)))) == []
    assert len(kept(chain, ready(*(member(i, float(i < 2)) for i in range(4))))) == 4
    assert kept(chain, ready(*(member(i, float(i < 3)) for i in range(4)))) == []


def test_group_floor_drops_what_earlier_filters_left_too_small() -> None:
    operators = ({"use": "length_filter", "max_tokens": 3}, {"use": "group_floor", "members": 2})
    chain = chain_of(*operators)
    assert reasons(chain, ready(member(0, 1.0), member(1, 0.0, tokens=9))) == {
        "g-0": "group_floor:too_few_members",
        "g-1": "length_filter:too_many_tokens",
    }
    assert kept(chain, ready(member(0, 1.0), member(1, 0.0))) == ["g-0", "g-1"]
    assert kept(chain, ready(member(0, 1.0), size=1)) == ["g-0"]


def test_group_floor_above_the_group_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="every group would be dropped"):
        chain_of({"use": "group_floor", "members": 3})


def test_deduplicate_keeps_the_first_of_equal_answers() -> None:
    twin = msgspec.structs.replace(member(0, 1.0), episode_id="g-7")
    assert reasons(chain_of({"use": "deduplicate"}), ready(member(0, 1.0), twin, member(1, 0.0))) == {
        "g-7": "deduplicate:same_tokens"
    }


def test_deduplicate_does_not_starve_a_run_of_too_few_tasks() -> None:
    operator = {"use": "deduplicate", "task_versions": 1}
    chain = chain_of(operator, groups_per_step=2, max_staleness=1)  # 4 groups under way at most
    told: list[bool] = []
    for index in range(12):
        told.append(bool(kept(chain, ready(member(0, 1.0, group=f"g{index}"), member(1, 0.0, group=f"g{index}")))))
        saved, chain = chain.state_dict(), chain_of(operator, groups_per_step=2, max_staleness=1)
        chain.load_state_dict(saved)
    assert [index for index, is_kept in enumerate(told) if is_kept] == [0, 5, 10]


def test_deduplicate_that_joins_a_run_late_knows_the_version() -> None:
    chain = chain_of({"use": "deduplicate", "task_versions": 2})
    chain.load_state_dict({"version": 7})
    group = ready(member(0, 1.0), member(1, 0.0))
    assert kept(chain, group)
    chain.on_version(8)
    assert not chain.should_issue(group.task)
    chain.on_version(9)
    assert chain.should_issue(group.task)


def test_deduplicate_drops_a_task_that_was_kept_a_moment_ago() -> None:
    chain = chain_of({"use": "deduplicate", "task_versions": 2})
    task = Task("src", "t1")
    assert chain.should_issue(task)
    assert kept(chain, ready(member(0, 1.0, group="a"), member(1, 0.0, group="a")))
    assert not chain.should_issue(task)
    assert kept(chain, ready(member(0, 1.0, group="b"), member(1, 0.0, group="b"))) == []
    assert kept(chain, ready(member(0, 1.0, group="c"), member(1, 0.0, group="c"), task="other"))
    chain.on_version(1)
    assert not chain.should_issue(task)
    chain.on_version(2)
    assert chain.should_issue(task)


# --- equal rewards --------------------------------------------------------------------------------


def test_equal_rewards_with_credit_per_turn() -> None:
    def with_turns(index: int, *rewards: float) -> EpisodeSamples:
        turns = tuple(TurnCredit(f"t{i}", f"t{i - 1}" if i else "", r, state=f"s{i}") for i, r in enumerate(rewards))
        return member(index, 1.0, turns=turns)

    per_turn, discounted = VarianceRule("turn"), VarianceRule("turn", gamma=0.9)
    swapped = ready(with_turns(0, 1.0, 0.0), with_turns(1, 0.0, 1.0))
    assert has_zero_variance(swapped)
    assert not has_zero_variance(swapped, per_turn)
    same = ready(with_turns(0, 1.0, 0.0), with_turns(1, 1.0, 0.0))
    assert has_zero_variance(same, per_turn)
    assert not has_zero_variance(same, VarianceRule("step_groups"))
    plain = ready(with_turns(0, 0.0, 0.0), with_turns(1, 0.0))
    assert has_zero_variance(plain, per_turn)
    assert not has_zero_variance(plain, discounted)  # 0.9 at one root, 1 at the other
    assert has_zero_variance(ready(with_turns(0, 0.0, 0.0), with_turns(1, 0.0, 0.0)), discounted)


def test_forks_with_turn_rewards_are_never_equal() -> None:
    """Two turns at one depth may be compared with each other."""
    turns = (TurnCredit("root"), TurnCredit("left", "root", 1.0), TurnCredit("right", "root", 0.0))
    forked = ready(member(0, 1.0, turns=turns), member(1, 1.0, turns=turns))
    assert not has_zero_variance(forked, VarianceRule("turn"))
    single = ready(*(member(i, 1.0, turns=(TurnCredit("t", "", 1.0),)) for i in range(2)))
    assert has_zero_variance(single, VarianceRule("turn"))
    assert has_zero_variance(single, VarianceRule("step_groups", gamma=0.5))


def test_equal_rewards_are_per_agent() -> None:
    group = ready(member(0, 1.0, agent="a"), member(0, 0.0, agent="b"), member(1, 1.0, agent="a"))
    assert has_zero_variance(group)


# --- shaping --------------------------------------------------------------------------------------


def test_overlong_shaping_is_dapo_equation_13() -> None:
    """L_max 10, L_cache 4: 0 up to 6, (6 - |y|) / 4 up to 10, then -1."""
    chain = chain_of({"use": "overlong_shaping", "max_tokens": 10, "buffer_tokens": 4})
    lengths = (5, 6, 7, 8, 10, 11)
    group = ready(*(member(i, 1.0, tokens=length) for i, length in enumerate(lengths)))
    assert shaping(chain, group) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    outcome = chain.on_group(group)
    assert [s.value for s in outcome.shaping] == [-0.25, -0.5, -1.0, -1.0]
    assert chain.metrics()["operator/overlong_shaping/shaped"] == 8.0  # two calls, four each


def test_overlong_shaping_of_the_longest_turn() -> None:
    sample = TrainingSample.build(
        "s",
        token_ids=np.arange(12, dtype=np.int32),
        sampled=np.array([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], np.uint8),
        sampling_logprobs=np.zeros(12, np.float32),
        versions=np.zeros(12, np.int32),
        turn_ids=("a", "b"),
        turn_starts=(1, 6),
    )
    group = ready(member(0, 1.0, samples=(sample,)), member(1, 0.0))
    options = {"use": "overlong_shaping", "max_tokens": 8, "buffer_tokens": 4}
    assert shaping(chain_of({**options, "of": "turn"}), group) == [-0.5, 0.0]  # 6 tokens
    assert shaping(chain_of({**options, "of": "agent", "penalty": 2.0}), group) == [-2.0, 0.0]  # 9 tokens


def test_reward_clip_scale_and_shaping_add_up_in_order() -> None:
    chain = chain_of(
        {"use": "reward_scale", "factor": 2.0, "offset": -1.0},
        {"use": "reward_clip", "min": -1.0, "max": 1.0},
        {"use": "reward_shaping", "metrics": {"steps": -0.01}, "per_turn": 0.5, "per_token": 0.001},
    )
    group = ready(
        member(0, 2.0),
        member(1, 0.25),
        metrics={("g-0", 1): {"steps": 10.0}},
    )
    outcome = chain.on_group(group)
    assert outcome.group is not None
    shaped = [m.shaped_reward for m in outcome.group.members]
    assert shaped == pytest.approx([1.0 - 0.1 + 0.5 + 0.002, -0.5 + 0.5 + 0.002])
    assert [m.reward for m in outcome.group.members] == [2.0, 0.25]
    assert chain.metrics()["operator/reward_shaping/missing"] == 1.0


# --- curricula ------------------------------------------------------------------------------------


def closed(chain: OperatorChain, task: str, *rewards: float, group: str = "g") -> None:
    chain.on_group(ready(*(member(i, reward, group=group) for i, reward in enumerate(rewards)), task=task))


def test_curriculum_solved_follows_the_moving_average() -> None:
    """0.5, then 0.7 * 0.5 + 0.3 * 1 = 0.65, then 0.755: solved at 0.7."""
    chain = chain_of({"use": "curriculum_solved", "threshold": 0.7, "recheck": 0.0})
    task = Task("src", "t1")
    for rewards, score in (((0.0, 1.0), 0.5), ((1.0, 1.0), 0.65), ((1.0, 1.0), 0.755)):
        assert chain.should_issue(task)
        closed(chain, "t1", *rewards)
        assert chain.metrics()["operator/curriculum_solved/score_mean"] == pytest.approx(score)
    assert not chain.should_issue(task)
    assert chain.should_issue(Task("src", "unknown"))
    assert chain.metrics()["operator/curriculum_solved/solved"] == 1.0


def test_curriculum_sees_groups_that_other_operators_drop() -> None:
    chain = chain_of({"use": "zero_variance_filter"}, {"use": "curriculum_solved", "recheck": 0.0})
    closed(chain, "t1", 1.0, 1.0)
    assert not chain.should_issue(Task("src", "t1"))


def test_curriculum_solved_rechecks_now_and_then() -> None:
    chain = chain_of({"use": "curriculum_solved", "recheck": 0.25})
    closed(chain, "t1", 1.0, 1.0)
    asked = [chain.should_issue(Task("src", "t1")) for _ in range(400)]
    assert 60 < sum(asked) < 140


def test_difficulty_target_prefers_tasks_near_it() -> None:
    chain = chain_of({"use": "difficulty_target", "target": 0.5, "width": 0.25, "floor": 0.05})
    operator = chain._links[0].operator  # pyright: ignore[reportPrivateUsage]
    assert isinstance(operator, DifficultyTarget)
    assert operator.probability(0.5) == 1.0
    assert operator.probability(0.75) == pytest.approx(0.60653066)
    assert operator.probability(1.0) == pytest.approx(0.13533528)
    assert operator.probability(2.0) == 0.05
    closed(chain, "easy", 1.0, 1.0)
    closed(chain, "right", 0.0, 1.0)
    assert all(chain.should_issue(Task("src", "right")) for _ in range(50))
    assert 20 < sum(chain.should_issue(Task("src", "easy")) for _ in range(400)) < 100


def test_scores_count_successes_where_a_bar_is_set() -> None:
    chain = chain_of({"use": "difficulty_target", "success": 2.0})
    closed(chain, "t1", 5.0, 1.0)
    assert chain.metrics()["operator/difficulty_target/score_mean"] == 0.5


def test_greso_probabilities_by_hand() -> None:
    options = {"p_easy": 0.5, "p_hard": 0.8, "target_easy": 0.25, "step": 0.1, "floor": 0.2}
    chain = chain_of({"use": "greso", **options})
    operator = chain._links[0].operator  # pyright: ignore[reportPrivateUsage]
    assert isinstance(operator, Greso)
    assert operator.probability(1, "easy") == 0.5
    assert operator.probability(2, "hard") == pytest.approx(0.64)
    assert operator.probability(9, "easy") == 0.2
    for group, rewards in enumerate(((1.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))):
        closed(chain, f"t{group}", *rewards)
    chain.on_version(1)
    # easy: 1 of 4 is at its target, so p falls; hard: 0 of 4 is below 1/6, so p rises
    assert operator.p == pytest.approx({"easy": 0.4, "hard": 0.9})
    chain.on_version(2)  # nothing closed since
    assert operator.p == pytest.approx({"easy": 0.4, "hard": 0.9})


def test_greso_skips_by_streaks_that_end_with_the_first_unequal_group() -> None:
    chain = chain_of({"use": "greso", "p_easy": 0.5, "floor": 0.0})
    task = Task("src", "t1")
    assert all(chain.should_issue(task) for _ in range(20))
    for _ in range(3):
        closed(chain, "t1", 1.0, 1.0)
    assert 20 < sum(chain.should_issue(task) for _ in range(400)) < 90  # 0.5^3
    closed(chain, "t1", 0.0, 1.0)
    assert all(chain.should_issue(task) for _ in range(20))


def test_no_curriculum_starves_the_run() -> None:
    chain = chain_of({"use": "curriculum_solved", "recheck": 0.0})
    closed(chain, "t1", 1.0, 1.0)
    asked = [chain.should_issue(Task("src", "t1")) for _ in range(600)]
    assert [place for place, issued in enumerate(asked) if issued] == [256, 513]
