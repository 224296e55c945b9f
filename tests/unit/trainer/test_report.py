"""What a step reports of its batch and its advantages."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from wingbeat.core.samples import EpisodeSamples, TrainingBatch
from wingbeat.trainer.report import advantage_metrics, batch_metrics
from wingbeat.trainer.rows import build_rows
from wingbeat.trainer.single import PolicyTrainer

MakeEpisode = Callable[..., EpisodeSamples]


def _metrics(*episodes: EpisodeSamples) -> dict[str, float]:
    batch = TrainingBatch("b", "p", 3, episodes, seed=0)
    return batch_metrics(batch, rows=build_rows(episodes, vocabulary=48))


def test_rewards_are_shown_as_reported_and_as_shaped(make_episode: MakeEpisode) -> None:
    rng = np.random.default_rng(0)
    metrics = _metrics(
        make_episode(rng, (-1,), reward=1.0, shaping=-0.5, source="sums", masked=3),
        make_episode(rng, (-1,), reward=0.0, shaping=0.5, source="sums", episode_id="f"),
        make_episode(rng, (-1,), reward=4.0, source="words", episode_id="g", masked=1),
    )
    assert metrics["reward/mean"] == pytest.approx(5 / 3)
    assert metrics["reward/shaped_mean"] == pytest.approx(5 / 3)
    assert (metrics["reward/mean/sums"], metrics["reward/mean/words"]) == (0.5, 4.0)
    assert metrics["masked_tokens"] == 4
    assert metrics["staleness/max"] == 2


def test_a_group_is_constant_by_what_it_trains_on(make_episode: MakeEpisode) -> None:
    rng = np.random.default_rng(0)
    pair = [make_episode(rng, (-1,), reward=1.0, episode_id=name) for name in "ef"]
    assert _metrics(*pair)["frac_reward_zero_std"] == 1
    shaped = msgspec.structs.replace(pair[0], shaping=-0.1)
    assert _metrics(shaped, pair[1])["frac_reward_zero_std"] == 0


def test_an_attempt_is_counted_once_for_each_agent(make_episode: MakeEpisode) -> None:
    rng = np.random.default_rng(0)
    facts = [{"agent": "a"}, {"agent": "b"}, {"agent": "b", "attempt": 2}, {"agent": "b"}]
    metrics = _metrics(*(make_episode(rng, (-1, 0), **found) for found in facts))
    assert (metrics["batch/episodes"], metrics["trained_tokens"]) == (3, 16)
    assert metrics["batch/tokens_per_episode"] == pytest.approx(16 / 3)
    assert not any(name.startswith("reward/mean/") for name in metrics), "they have no source"


def test_advantages_by_hand() -> None:
    found = advantage_metrics([np.array([1.0, -3.0]), np.zeros(0), np.array([0.0, 0.0])])
    assert found == {
        "advantage/mean": -0.5,
        "advantage/std": pytest.approx(1.5),
        "advantage/max_abs": 3,
        "advantage/zero": 0.5,
    }
    assert advantage_metrics([np.zeros(0)]) == {}


@pytest.mark.parametrize("settings", [{}, {"credit": "turn"}, {"credit": "step_groups"}, {"algorithm": "ppo"}])
def test_members_whose_tokens_are_all_masked_are_there_for_the_baseline(
    settings: dict[str, str], make_trainer: Callable[..., PolicyTrainer], make_episode: MakeEpisode
) -> None:
    """Two of three are left; and a batch in which nothing is left to train changes nothing but the version."""
    rng = np.random.default_rng(0)
    trio = [make_episode(rng, (-1, 0), rewards=(0.5, index), states="xy", episode_id=f"e{index}") for index in range(3)]
    gone = [msgspec.structs.replace(episode, samples=(), masked=4) for episode in trio]
    trainer = make_trainer(**settings)
    result = trainer.train_step(TrainingBatch("b", "p", 1, (gone[0], *trio[1:]), seed=0))
    assert (result.metrics["trained_tokens"], result.metrics["masked_tokens"]) == (8, 4)
    if not settings:
        assert list(result.advantages.values()) == pytest.approx([-1, 0, 1], abs=1e-3)
    before = {name: tensor.clone() for name, tensor in trainer.published_tensors().items()}
    result = trainer.train_step(TrainingBatch("c", "p", 2, tuple(gone), seed=0))
    assert (trainer.step, result.metrics["trained_tokens"], result.metrics["grad_norm"]) == (2, 0, 0)
    # AdamW's momentum goes on.
    assert any(not np.array_equal(before[name], tensor) for name, tensor in trainer.published_tensors().items())
