"""The algorithm benchmark runs every algorithm there is, and hands the trainer what was sampled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.algorithms import ALGORITHMS, SUPERVISED, Found, recipe, report, steps_to_bar, table
from bench.calculator_training import MAX_ROUNDS, Played, Recipe, TaskStream, Trained, sample_groups
from wingbeat.core.config import TrainerConfig
from wingbeat.core.config.trainer import Algorithm
from wingbeat.environments.calculator import CalculatorTask, make_split

ROOT = Path(__file__).parents[3]
TASKS = make_split(0)[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_recipe_that_its_configuration_accepts(algorithm: Algorithm, tmp_path: Path) -> None:
    settings = recipe(algorithm, steps=3, teacher=tmp_path)
    assert TrainerConfig(**settings.trainer).algorithm == algorithm
    assert settings.steps == 3
    assert settings.samples_equal_groups_again == (algorithm == "dapo")


def test_sampled_tokens_keep_their_logprobs_versions_and_turns() -> None:
    played = Played(TASKS[0], [1, 2])
    played.begin_turn()
    played.sample([10], [-0.5], version=3)
    played.sample([11], [-0.25], version=4)
    played.render([20, 21])
    played.begin_turn()
    played.sample([12], [-1.0], version=4)
    played.reward = 1.0
    episode = played.samples(group=2, member=5, step=7)
    (sample,) = episode.samples
    assert (episode.episode_id, episode.group_id, episode.reward) == ("7-2-5", "7-2", 1.0)
    assert sample.tokens_T.tolist() == [1, 2, 10, 11, 20, 21, 12]
    assert sample.sampled_T.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert sample.versions_T.tolist() == [-1, -1, 3, 4, -1, -1, 4]
    assert np.allclose(sample.sampling_logprobs_T, [0, 0, -0.5, -0.25, 0, 0, -1.0])
    assert sample.turn_starts == (2, 6)
    assert [(turn.turn_id, turn.parent_id) for turn in episode.turns] == [("7-2-5-0", ""), ("7-2-5-1", "7-2-5-0")]


def test_a_stream_deals_every_task_before_any_comes_again() -> None:
    stream = TaskStream(TASKS[:7], seed=1)
    first, second = ({stream.next().id for _ in range(7)} for _ in range(2))
    assert first == second == {task.id for task in TASKS[:7]}


class Scripted:
    """Stands in for a player: the groups of its tasks get these rewards in turn."""

    def __init__(self, *rewards: list[float]) -> None:
        self.rewards = list(rewards)

    def play(self, tasks: list[CalculatorTask]) -> list[Played]:
        episodes: list[Played] = []
        while len(episodes) < len(tasks):
            for reward in self.rewards.pop(0):
                played = Played(tasks[len(episodes)], [1, 2])
                played.begin_turn()
                played.sample([3], [-1.0], version=0)
                played.reward = reward
                episodes.append(played)
        return episodes


@pytest.mark.parametrize("again", [False, True])
def test_groups_of_equal_rewards_are_sampled_again_where_the_recipe_says_so(again: bool) -> None:
    player = Scripted([1.0, 1.0], [0.0, 1.0], [1.0, 0.0])
    settings = Recipe({}, groups_per_step=2, group_size=2, samples_equal_groups_again=again)
    stream = TaskStream(TASKS, seed=0)
    samples, rewards = sample_groups(player, stream, settings, step=1)  # type: ignore[arg-type]
    assert [episode.reward for episode in samples] == ([0.0, 1.0, 1.0, 0.0] if again else [1.0, 1.0, 0.0, 1.0])
    assert len(rewards) == (6 if again else 4), "what was sampled and left out counts in the curve"


def test_sampling_again_ends() -> None:
    player = Scripted(*[[1.0, 1.0]] * MAX_ROUNDS)
    settings = Recipe({}, groups_per_step=1, group_size=2, samples_equal_groups_again=True)
    samples, _ = sample_groups(player, TaskStream(TASKS, seed=0), settings, step=1)  # type: ignore[arg-type]
    assert len(samples) == 2


def run(*curve: float, final: float = 0.9) -> Trained:
    return Trained(final, time_s=2.0, cpu_s=1.0, curve=curve)


def test_steps_to_the_bar_are_counted_by_a_moving_mean() -> None:
    assert steps_to_bar([run(0.0, 0.8, 0.8, 0.8, 0.8, 0.8)]) == 6
    assert steps_to_bar([run(1.0, 1.0, 0.5, 1.0, 1.0)]) == 5
    assert steps_to_bar([run(1.0, 1.0, 1.0, 1.0, 1.0), run(0.5, 0.5, 0.5, 0.5, 0.5)]) is None


def test_the_bar_is_of_every_seed_and_of_learners_from_rewards() -> None:
    found: dict[Algorithm, list[Trained]] = {
        "grpo": [run(0.1, 0.9), run(0.1, 0.9, final=0.79)],
        "rloo": [run(0.1, 0.9), run(0.1, 0.9, final=0.8)],
        "sft": [run(0.1, 0.2, final=0.2)],
    }
    summary = report(Found(found, [run(0.2, 0.2, final=0.3), run(0.2, 0.2, final=0.5)]))
    assert summary["grpo"]["final_reward"] == pytest.approx(0.845)
    assert summary["bars"] == {
        "grpo >= 0.8 on every seed": False,
        "rloo >= 0.8 on every seed": True,
        "control_shuffled_advantages < 0.5 on every seed": False,
    }
    assert "sft" in SUPERVISED
    assert table(summary, ["grpo", "sft"]).splitlines()[2:] == [
        "| `grpo` | 0.90, 0.79 | 0.845 | never | 2.0 |",
        "| `sft` | 0.20 | 0.200 | never | 2.0 |",
    ]


@pytest.mark.slow
def test_a_quick_run_reports_each_algorithm_that_it_is_asked_for() -> None:
    names = ("dapo", "ppo", "sft", "distill")  # whose samplers, trainers or teachers differ from those of grpo
    command = [sys.executable, "-m", "bench.algorithms", "--quick", "--table", "--only", *names]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True, timeout=280)
    summary = json.loads(done.stdout.splitlines()[-1])
    for algorithm in names:
        assert summary[algorithm].keys() >= {"final_reward", "time_s"}
        assert f"| `{algorithm}` |" in done.stdout
