"""What went wrong in other trainers, with their own numbers: each case must stay right here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.trainer.advantages import compute_advantages
from wingbeat.trainer.assignment import Evidence, assign_credit
from wingbeat.trainer.rows import build_rows
from wingbeat.trainer.single import PolicyTrainer

MakeTrainer = Callable[..., PolicyTrainer]
MakeBatch = Callable[..., TrainingBatch]
MakeEpisode = Callable[..., EpisodeSamples]


def _moments(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """After a first step: the gradient, up to a factor that is always the same."""
    return {name: t.clone() for name, t in trainer.state_tensors().items() if name.startswith("exp_avg.")}


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in left.values()))


def test_rollouts_that_yield_more_rows_do_not_outvote(make_episode: MakeEpisode) -> None:
    """Agent Lightning, issue 489: rewards 1, 0, 1, 0 that yield 2, 1, 2, 1 rows gave the baseline 0.667."""
    rng = np.random.default_rng(0)
    episodes = [
        make_episode(rng, (-1,) * rows, reward=reward, episode_id=f"e{index}")
        for index, (reward, rows) in enumerate([(1.0, 2), (0.0, 1), (1.0, 2), (0.0, 1)])
    ]
    assert [len(episode.samples) for episode in episodes] == [2, 1, 2, 1]
    rows = build_rows(episodes, vocabulary=48)
    for credit in ("episode", "turn"):
        config = TrainerConfig(algorithm="dr_grpo", credit=credit)
        found = assign_credit(episodes, rows, config=config, evidence=Evidence(), seed=0)
        assert found.episodes == [0.5, -0.5, 0.5, -0.5]
        assert {value for values in found.advantages_N for value in values.tolist()} == {0.5, -0.5}


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "maxrl", "m2po"])
def test_groups_of_unequal_size_keep_their_own_baselines(algorithm: Any, make_episode: MakeEpisode) -> None:
    """slime, issue 2230: groups of 4, 3 and 4; the three all score 5, and got -1.09 from a global reshape."""
    rewards = [1.0, 2, 3, 4, 5, 5, 5, 0, 0, 1, 8]
    groups = ["a"] * 4 + ["b"] * 3 + ["c"] * 4
    episodes = [
        make_episode(np.random.default_rng(0), (-1,), reward=reward, group_id=group)
        for reward, group in zip(rewards, groups, strict=True)
    ]
    found = compute_advantages(episodes, algorithm=algorithm, eps=1e-4)
    assert found[4:7] == [0.0, 0.0, 0.0]
    assert all(value != 0 for value in found[:4] + found[7:])
    assert sum(found[:4]) == pytest.approx(0) == sum(found[7:])


def test_every_turn_s_own_tokens_carry_its_advantage(make_episode: MakeEpisode) -> None:
    """SkyRL, issue 1492: turns of one rollout have their tokens at different positions; the advantage was placed by
    the mask of another turn, so that some response tokens had none."""
    rng = np.random.default_rng(0)
    episodes = [
        make_episode(rng, (-1, 0, 1), lengths=(5, 1, 3), rewards=(1, 2, 4), episode_id="long"),
        make_episode(rng, (-1, -1, -1), lengths=(1, 4, 2), rewards=(0, 0, 0), episode_id="forks"),
    ]
    rows = build_rows(episodes, vocabulary=48)
    whole = assign_credit(episodes, rows, config=TrainerConfig(algorithm="dr_grpo"), evidence=Evidence(), seed=0)
    assert [values.tolist() for values in whole.advantages_N] == [[3.5] * 9, [-3.5], [-3.5] * 4, [-3.5] * 2]
    config = TrainerConfig(algorithm="reinforce", credit="turn")
    found = assign_credit(episodes, rows, config=config, evidence=Evidence(), seed=0)
    assert found.advantages_N[0].tolist() == [7] * 5 + [6] + [4] * 3
    positions = rows[0].targets_N.tolist()
    assert positions == [2, 3, 4, 5, 6, 9, 12, 13, 14]


@pytest.mark.parametrize(
    "algorithm", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dapo", "dr_grpo", "gspo"))]
)
def test_accumulation_never_scales_the_gradient(
    algorithm: str, make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    """TRL, issue 6024: with 4 generation steps and accumulation over 2 the gradient was half as large."""
    batch = make_batch(groups=2, size=4)
    settings: dict[str, Any] = {"algorithm": algorithm, "max_grad_norm": 1e9, "dtype": torch.float64, "kind": "llama"}
    norms: list[float] = []
    moments: list[dict[str, Tensor]] = []
    for tokens in (100_000, 160, 80, 40, 1):
        trainer = make_trainer(micro_batch_tokens=tokens, prefix_tree="off", sequence_packing="off", **settings)
        norms.append(trainer.train_step(batch).metrics["grad_norm"])
        moments.append(_moments(trainer))
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-12)
    assert max(_distance(moments[0], found) for found in moments) <= 1e-12


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_temperature_leaves_the_ratio_at_one(
    temperature: float, make_trainer: MakeTrainer, make_batch: MakeBatch, build_model: Callable[..., Any]
) -> None:
    """TRL, issue 4159: the same weights at T = 0.6 gave a ratio of 2, because only the sampler divided by it."""
    model = build_model("llama")

    def drawn(sample: TrainingSample) -> TrainingSample:
        ids = torch.from_numpy(sample.tokens_T.astype(np.int64))
        with torch.no_grad():
            logprobs_TV = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        found = logprobs_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        logprobs_T = np.where(sample.sampled_T, np.concatenate([[0], found]), 0).astype(np.float32)
        return msgspec.structs.replace(sample, temperature=temperature, sampling_logprobs=logprobs_T.tobytes())

    batch = make_batch()
    episodes = tuple(
        msgspec.structs.replace(episode, samples=tuple(map(drawn, episode.samples))) for episode in batch.episodes
    )
    metrics = make_trainer(kind="llama").train_step(msgspec.structs.replace(batch, episodes=episodes)).metrics
    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert metrics["max_abs_logprob_diff"] < 1e-5
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-9)


def test_a_row_without_advantage_but_with_cross_entropy_is_kept(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    """prime-rl, issue 3223: rows of advantage 0 were dropped although their cross-entropy had a weight."""
    solved = make_batch(rewards=[1.0] * 8)
    settings: dict[str, Any] = {"max_grad_norm": 1e9, "kind": "llama"}
    alone, beside = make_trainer(sft_coef=0.5, **settings), make_trainer(**settings)
    assert beside.train_step(solved).metrics["grad_norm"] == 0
    metrics = alone.train_step(solved).metrics
    assert metrics["grad_norm"] > 0
    assert metrics["perf/row_tokens"] == sum(s.num_tokens for episode in solved.episodes for s in episode.samples)


def test_nothing_is_masked_in_silence(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """ART, issue 127, and rLLM, issue 352: trajectories masked to nothing trained on zeros for hours."""
    batch = make_batch()
    empty = tuple(
        msgspec.structs.replace(
            episode,
            masked=episode.num_sampled,
            samples=tuple(msgspec.structs.replace(s, sampled=bytes(s.num_tokens)) for s in episode.samples),
        )
        for episode in batch.episodes[:4]
    )
    half = msgspec.structs.replace(batch, episodes=empty + batch.episodes[4:])
    whole, less = (make_trainer().train_step(found).metrics for found in (batch, half))
    assert less["masked_tokens"] == sum(episode.num_sampled for episode in batch.episodes[:4])
    assert less["trained_tokens"] + less["masked_tokens"] == whole["trained_tokens"]
    assert (whole["batch/episodes"], less["batch/episodes"]) == (8, 8)
    assert less["batch/tokens_per_episode"] == less["trained_tokens"] / 8
