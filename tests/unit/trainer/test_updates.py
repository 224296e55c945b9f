"""What each token weighs: by hand, and whatever way a batch is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.rows import build_rows
from wingbeat.trainer.scores import Scores
from wingbeat.trainer.updates import Update, plan_updates


def _sample(name: str, trained: int) -> TrainingSample:
    length = trained + 1
    sampled = np.asarray([0] + [1] * trained, np.uint8)
    return TrainingSample.build(
        name,
        token_ids=np.arange(length, dtype=np.int32),
        sampled=sampled,
        sampling_logprobs=np.where(sampled, -1, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
    )


def _batch() -> TrainingBatch:
    """Group g: episodes of 3 + 1 and 2 trained tokens, rewards 1 and 0; group h: one of 4, one of none."""
    plan = [("g", 1.0, [3, 1]), ("g", 0.0, [2]), ("h", 0.5, [4]), ("h", 1.0, [])]
    episodes = tuple(
        EpisodeSamples(f"e{n}", 1, group, "p", "", reward, tuple(_sample(f"e{n}s{k}", t) for k, t in enumerate(tokens)))
        for n, (group, reward, tokens) in enumerate(plan)
    )
    return TrainingBatch("b", "p", 1, episodes, seed=0)


def _updates(batch: TrainingBatch, *, parts: int = 1, **settings: Any) -> list[Update]:
    config = LossConfig.resolve(TrainerConfig(**settings), context_tokens=8)
    rows = build_rows(batch.episodes, vocabulary=48)
    advantages_N = [np.ones(row.num_trained) for row in rows]
    return plan_updates(batch, rows=rows, advantages_N=advantages_N, scores=Scores(), config=config, parts=parts)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"algorithm": "maxrl"}, [1 / 4, 1 / 4, 1 / 4, 0]),
        ({"algorithm": "grpo"}, [1 / 16, 1 / 8, 1 / 16, 0]),
        ({"algorithm": "dapo"}, [1 / 10, 1 / 10, 1 / 10, 0]),
        # A mean over the tokens of each prompt, then over prompts: 2 groups of 6 and 4 tokens.
        ({"algorithm": "dapo", "token_mean": "prompt"}, [1 / 12, 1 / 12, 1 / 8, 0]),
        ({"algorithm": "ppo", "token_mean": "prompt"}, [1 / 12, 1 / 12, 1 / 8, 0]),
        ({"algorithm": "m2po"}, [1 / 10, 1 / 10, 1 / 10, 0]),
    ],
)
def test_weights_by_hand(settings: dict[str, Any], weights: list[float]) -> None:
    (update,) = _updates(_batch(), **settings)
    assert update.credit.weights == pytest.approx(weights)
    assert len(update.rows) == 4, "an episode without a trained token has no row, and counts in the denominator"


def test_the_mean_per_prompt_gives_each_prompt_the_same_weight() -> None:
    """trl#5375: DAPO's mean over tokens is per prompt in the paper, per batch in most code; here an option."""
    (update,) = _updates(_batch(), algorithm="decoupled_ppo", token_mean="prompt")
    by_group = [0.0, 0.0]
    for row in update.rows:
        by_group[row.episode // 2] += row.num_trained * update.credit.weights[row.episode]
    assert by_group == pytest.approx([0.5, 0.5])


def test_cross_entropy_weights_by_hand() -> None:
    """Rewards of at least 1: one episode with 4 tokens, one with none; from 0.5 on also the one of 4."""
    (update,) = _updates(_batch(), algorithm="sft")
    assert update.credit.sft_weights == [1 / 4, 0, 0, 1 / 4]
    (update,) = _updates(_batch(), algorithm="grpo", sft_coef=0.1, sft_min_reward=0.5)
    assert update.credit.sft_weights == [1 / 8, 0, 1 / 8, 1 / 8]
    (update,) = _updates(_batch(), algorithm="sft", sft_min_reward=2.0)
    assert update.credit.sft_weights == [0.0] * 4
    (update,) = _updates(_batch())
    assert not update.credit.sft_weights


def test_shaping_counts_towards_what_cross_entropy_chooses() -> None:
    batch = _batch()
    first = msgspec.structs.replace(batch.episodes[0], shaping=-0.5)
    (update,) = _updates(msgspec.structs.replace(batch, episodes=(first, *batch.episodes[1:])), algorithm="sft")
    assert update.credit.sft_weights == [0, 0, 0, 0], "the other one has no token to train"


def test_each_update_has_its_own_denominators() -> None:
    updates = _updates(_batch(), parts=2, algorithm="dapo")
    found = sorted(tuple(update.credit.weights) for update in updates)
    assert found == [(0, 0, 1 / 4, 0), (1 / 6, 1 / 6, 0, 0)]
    assert [update.on_policy_version for update in updates] == [0, None]


@pytest.mark.parametrize("token_mean", ["batch", "prompt"])
def test_every_trained_token_is_in_one_update(token_mean: str, make_batch: Callable[..., TrainingBatch]) -> None:
    batch = make_batch(groups=5)
    updates = _updates(batch, parts=3, algorithm="dapo", token_mean=token_mean)
    indices = [row.index for update in updates for row in update.rows]
    rows = build_rows(batch.episodes, vocabulary=48)
    assert sorted(indices) == [row.index for row in rows if row.num_trained]
    for update in updates:
        total = sum(row.num_trained * update.credit.weights[row.episode] for row in update.rows)
        assert total == pytest.approx(1.0), "the weights of an update's tokens are a mean"
