"""The trainer benchmark's own arithmetic; the whole of it is run by ``python -m bench.trainer --quick``."""

from __future__ import annotations

import pytest

from bench.trainer import bars
from bench.trainer_runs import Run
from bench.trainer_step import batch_of
from bench.trainer_work import BatchShape, TaskShape, make_groups, questions


@pytest.mark.parametrize("lengths", ["long-tailed", "equal"])
def test_both_sides_are_given_the_same_tokens(lengths: str) -> None:
    shape = BatchShape(lengths, lengths, groups=2, group_size=4)  # type: ignore[arg-type]
    groups = make_groups(shape, seed=0)
    assert groups == make_groups(shape, seed=0)
    batch = batch_of(groups)
    assert [episode.group_id for episode in batch.episodes] == ["0"] * 4 + ["1"] * 4
    assert sum(episode.num_sampled for episode in batch.episodes) == sum(
        len(completion) for group in groups for completion in group["completions"]
    )
    counts = {len(completion) for group in groups for completion in group["completions"]}
    assert (len(counts) == 1) == (lengths == "equal")
    assert all(0 < sum(group["rewards"]) < shape.group_size for group in groups)


def test_every_group_has_a_question_of_its_own() -> None:
    shape = TaskShape(steps=3, groups_per_step=2)
    found = questions(shape, seed=1, extra=2)
    assert len(set(found)) == 3 * 2 + 2
    assert found != questions(shape, seed=2, extra=2)


def test_when_a_run_reached_the_reward() -> None:
    run = Run("ours", 0, begun_s=10.0, ended_s=[12.0, 14.0, 16.0, 18.0], rewards=[0.1, 0.4, 0.4, 0.5])
    assert run.steps_per_s == 0.5
    assert run.time_to(0.3) == 6.0
    assert run.time_to(0.4) == 8.0
    assert run.time_to(0.9) is None


def test_bars_of_what_was_measured() -> None:
    assert bars({"head": {"peak_ratio_vs_naive": 0.05, "speed_ratio_vs_naive": 0.9}}) == {
        "head.peak_ratio_vs_naive <= 0.1": True,
        "head.speed_ratio_vs_naive >= 0.95": False,
    }
    assert bars({"end_to_end": {"ratio_vs_trl": 2.0}, "time_to_reward_ratio": None}) == {
        "end_to_end.ratio_vs_trl >= 1.5": True,
        "time_to_reward_ratio <= 1": False,
    }
