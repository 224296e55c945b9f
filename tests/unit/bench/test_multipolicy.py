"""The multi-policy benchmark's arithmetic, and that its modes differ in what they say and in nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.multipolicy import QUICK, describe, report
from bench.team_agent import ORDER, WANTED, _score
from bench.team_report import Bound, final_reward, idle_share, paired, work_bound
from bench.team_runs import CpuMeter, Step, TeamRun, process_name, team_config
from bench.team_work import (
    ALPHABET,
    MIXTURE,
    NUM_TOOLS,
    POLICIES,
    Work,
    build_tokenizer,
    critical_path_s,
    draw_latency,
    latencies,
    make_tasks,
    write_model,
    write_tasks,
)
from wingbeat.environments.tasks_file import load_tasks_file
from wingbeat.tracking import ChatTemplate

ROOT = Path(__file__).parents[3]
WORK = Work(steps=2, groups_per_step=2, group_size=2)


def test_the_mixture_is_whole_and_has_no_gaps() -> None:
    assert sum(share for share, _, _ in MIXTURE) == pytest.approx(1.0)
    assert all(before[2] == after[1] for before, after in pairwise(MIXTURE))


def test_latencies_fall_into_the_buckets_as_often_as_stated() -> None:
    rng = random.Random(0)
    draws = [draw_latency(rng) for _ in range(20_000)]
    found = Counter(next(low for _, low, high in MIXTURE if low <= draw <= high) for draw in draws)
    for share, low, _ in MIXTURE:
        assert found[low] / len(draws) == pytest.approx(share, abs=0.01)


@given(seed=st.integers(0, 99), task=st.integers(0, 99), members=st.integers(1, 4))
def test_latencies_depend_on_seed_task_member_and_turn_alone(seed: int, task: int, members: int) -> None:
    few = latencies(seed, task, members=members, scale=1.0)
    more = latencies(seed, task, members=members + 2, scale=1.0)
    halved = latencies(seed, task, members=members, scale=0.5)
    assert few == more[:members]
    assert halved == [[second / 2 for second in turns] for turns in few]
    assert few != latencies(seed + 1, task, members=members, scale=1.0)


def test_a_member_calls_its_tools_one_after_another() -> None:
    assert critical_path_s([[1.0, 2.0, 3.0], [4.0, 0.5, 0.5]]) == 6.0


def test_a_run_has_a_training_task_for_each_group_and_evaluates_without_waiting(tmp_path: Path) -> None:
    train, evaluation = make_tasks(WORK, seed=3)
    assert len(train) == WORK.steps * WORK.groups_per_step == WORK.groups
    for task in train:
        sleep_s = task.payload["sleep_s"]
        assert len(sleep_s) == WORK.group_size
        assert {len(member) for member in sleep_s} == {NUM_TOOLS} == {len(ORDER) - 1}
    assert all("sleep_s" not in task.payload for task in evaluation)
    loaded = load_tasks_file(write_tasks(tmp_path, train, evaluation))
    assert (list(loaded.train), list(loaded.eval)) == (train, evaluation)


def test_every_character_is_one_token_and_comes_back(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(ALPHABET, add_special_tokens=False).ids
    assert len(set(ids)) == len(ALPHABET)
    assert tokenizer.decode(ids) == ALPHABET
    assert all(wanted <= set(ALPHABET) for wanted in WANTED.values())
    write_model(tmp_path, QUICK, seed=0)
    assert ChatTemplate.load(tmp_path).encode("<|im_start|>user\n")


def test_the_reward_is_the_share_of_all_characters_that_may_be_written() -> None:
    assert _score("planner", ["aeiou", "xyz"], reply_tokens=5) == 0.5
    assert _score("worker", ["11111", "13579"], reply_tokens=5) == 1.0


def test_modes_differ_in_staleness_and_barrier_only(tmp_path: Path) -> None:
    def settings(mode: str) -> dict[str, Any]:
        models = {name: tmp_path / name for name in POLICIES}
        config = team_config(WORK, mode=mode, seed=0, folder=tmp_path, models=models, tasks=tmp_path / "tasks.py")
        return config.model_dump(exclude={"run": {"name"}})

    sync, barrier, ours = (settings(mode) for mode in ("sync", "barrier", "ours"))
    assert (sync["dataflow"].pop("max_staleness"), sync["dataflow"].pop("barrier")) == (0, True)
    assert (barrier["dataflow"].pop("max_staleness"), barrier["dataflow"].pop("barrier")) == (5, True)
    assert (ours["dataflow"].pop("max_staleness"), ours["dataflow"].pop("barrier")) == (5, False)
    assert sync == barrier == ours


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "-m", "wingbeat.server", "launch.json"], "control"),
        (
            ["python", "-m", "wingbeat.workers", "trainer", "--worker-id", "trainer-worker", "--threads", "1"],
            "trainer-worker",
        ),
        (["python", "-m", "wingbeat.cli", "rollout", "agent.py"], "agent"),
        (["python", "-m", "bench.multipolicy"], "other"),
    ],
)
def test_processes_are_known_by_their_command(words: list[str], name: str) -> None:
    assert process_name(words) == name


def test_cpu_seconds_are_those_of_the_time_between() -> None:
    samples = [(0.0, {"control": 1.0}), (1.0, {"control": 2.0, "agent": 0.5}), (2.0, {"control": 4.0, "agent": 1.0})]
    assert CpuMeter(samples).between(0.5, 2.5) == {"control": 2.0, "agent": 0.5}
    assert CpuMeter(samples).between(-1.0, 1.5) == {"control": 1.0, "agent": 0.5}


def team_run(mode: str, *, seed: int = 0, wall_s: float = 10.0, trainer_s: float = 6.0, reward: float = 0.9) -> TeamRun:
    return TeamRun(
        mode=mode,
        seed=seed,
        wall_s=wall_s,
        steps={name: [Step(ended_s=2.0, train_s=1.0), Step(ended_s=5.0, train_s=2.0)] for name in POLICIES},
        cpu_s={
            "control": 1.0,
            "engine-0": 3.0,
            "trainer-planner": trainer_s,
            "trainer-worker": trainer_s - 1,
            "agent": 0.5,
        },
        group_paths_s=(4.0, 0.5, 1.0, 0.25),
        rewards={name: {"eval-0": reward, "eval-1": reward} for name in POLICIES},
        curves={name: [0.1, reward] for name in POLICIES},
        staleness_max=0,
        discard_rate=0.0,
        episodes=8,
        sampled_tokens=100,
        forward_tokens=1000.0,
    )


def test_the_bound_counts_the_least_that_any_mode_needed() -> None:
    runs = [team_run("sync", trainer_s=5.0), team_run("ours", trainer_s=6.0)]
    # 1 + 0.5 + 3 + 5 + 4 CPU seconds on two cores, 12 of them compute; 0.5 s until two groups are there, then 5 s of
    # steps; 4 s, then one of 2 steps
    assert work_bound(runs, WORK, cores=2) == Bound(cores=6.75, trainer=5.5, tail=6.5, compute=6.0)
    assert work_bound(runs, WORK, cores=1).seconds == 13.5


def test_a_trainer_idles_when_it_is_not_in_a_step() -> None:
    steps = [Step(ended_s=2.0, train_s=1.0), Step(ended_s=5.0, train_s=2.0)]
    assert idle_share(steps) == 0.25
    assert idle_share(steps[:1]) == 0.0


def test_paired_differences_have_students_interval() -> None:
    found = paired([1.0, 0.8, 0.9], [0.8, 0.8, 0.8])
    assert found.mean == pytest.approx(0.1)
    assert found.low == pytest.approx(0.1 - 4.303 * 0.1 / 3**0.5)
    assert found.holds(0.0) and not found.holds(-1.0)
    assert paired([1.0], [0.0]).holds(0.0), "one seed says nothing about noise"


def test_the_report_has_every_key_and_judges_ours() -> None:
    runs = [
        team_run(mode, seed=seed, wall_s=wall_s, reward=0.9 + 0.01 * seed)
        for seed in range(2)
        for mode, wall_s in (("sync", 30.0), ("barrier", 12.0), ("ours", 8.0))
    ]
    summary = report(runs, WORK, cores=2)
    assert summary["wall_s"] == {"sync": 30.0, "barrier": 12.0, "ours": 8.0}
    assert summary["speedup_over_sync"] == 3.75
    assert summary["vs_bound"] == round(7.75 / 8.0, 3)
    assert summary["vs_bound_compute"] == round(7.0 / 8.0, 3)
    assert summary["trainer_idle_share"] == 0.25
    assert summary["final_reward"] == {"sync": 0.905, "barrier": 0.905, "ours": 0.905}
    assert summary["final_reward_difference"]["ours_minus_sync"]["mean"] == 0.0
    assert list(summary["bars"].values()) == [True, True, True, True, False]
    json.dumps(summary)


def test_the_report_sees_a_difference_beyond_noise() -> None:
    better = {"sync": 0.95, "barrier": 0.9, "ours": 0.9}
    runs = [
        team_run(mode, seed=seed, reward=reward + 0.001 * seed) for seed in range(3) for mode, reward in better.items()
    ]
    assert not report(runs, WORK, cores=2)["bars"]["final rewards equal within the interval"]
    assert final_reward(runs[0]) == pytest.approx(0.95)


def test_the_description_states_the_mixture_and_the_scale() -> None:
    text = describe(dataclasses.replace(WORK, time_scale=0.05))
    assert "61% of 0.1 to 1 s, 27% of 1 to 10 s, 8% of 10 to 60 s, 4% of 60 to 120 s" in text
    assert "times 0.05" in text


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads CPU time from Linux")
def test_a_quick_run_reports_what_the_bench_promises() -> None:
    command = [sys.executable, "-m", "bench.multipolicy", "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True, timeout=280)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary.keys() >= {"wall_s", "speedup_over_sync", "final_reward", "vs_bound", "trainer_idle_share"}
    assert summary["wall_s"].keys() == {"sync", "barrier", "ours"}
    needed = QUICK.steps * QUICK.groups_per_step * QUICK.group_size
    assert summary["episodes"]["ours"] == needed
    # A policy held at a barrier may admit more than it needs, so that the one it waits for gets its groups.
    assert all(episodes >= needed for episodes in summary["episodes"].values())
    assert summary["staleness_max"]["sync"] == 0 < summary["staleness_max"]["ours"] <= QUICK.max_staleness
