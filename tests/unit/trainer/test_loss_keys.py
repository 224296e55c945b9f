"""From keys to losses: defaults, and what is refused because it would change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.trainer.loss_config import Corrections, KlPenalty, LossConfig


def _clip(**settings: Any) -> tuple[float, float]:
    found = LossConfig.resolve(TrainerConfig(**settings), context_tokens=99)
    return found.clip_low, found.clip_high


def test_clip_defaults_depend_on_the_algorithm() -> None:
    assert _clip(algorithm="grpo") == (0.2, 0.2)
    assert _clip(algorithm="cispo") == (1.0, 4.0)
    assert _clip(algorithm="cispo", clip_low=0.5) == (0.5, 4.0)
    assert _clip(algorithm="gspo") == (3e-4, 4e-4)
    assert _clip(algorithm="gspo", sequence_ratio="product") == (0.2, 0.2)
    assert _clip(algorithm="sapo") == _clip(algorithm="m2po") == _clip(algorithm="sft") == (1.0, math.inf)
    assert _clip(algorithm="ppo") == _clip(algorithm="decoupled_ppo") == (0.2, 0.2)
    assert _clip(algorithm="decoupled_ppo", clip_high=0.3, updates_per_batch=2) == (0.2, 0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "sapo", "clip_low": 0.2}, "no clip"),
        ({"algorithm": "sapo", "clip_high": 0.2}, "no clip"),
        ({"algorithm": "grpo", "sapo_tau_negative": 2.0}, "of sapo, not of grpo"),
        ({"algorithm": "grpo", "sequence_ratio": "product"}, "sequence_ratio is of gspo"),
        ({"algorithm": "cispo", "tis_cap": 2.0}, "tis_cap does not go with cispo"),
        ({"algorithm": "gspo", "tis_cap": 2.0}, "tis_cap does not go with gspo"),
        ({"algorithm": "sapo", "tis_cap": 2.0}, "tis_cap does not go with sapo"),
        ({"tis_cap": 0.5}, "greater than or equal to 1"),
        ({"sequence_mask_low": 1.5}, "less than or equal to 1"),
        ({"algorithm": "m2po", "clip_high": 0.2}, "m2po has a mask over the whole update"),
        ({"algorithm": "sft", "clip_low": 0.2}, "sft has no ratio and no clip"),
        ({"algorithm": "sft", "mis_high": 2.0}, "mis_high corrects a ratio, and sft has none"),
        ({"algorithm": "sft", "sft_coef": 1.0}, "sft is the cross-entropy itself"),
        ({"algorithm": "cispo", "sequence_tis_cap": 2.0}, "sequence_tis_cap does not go with cispo"),
        ({"tis_cap": 2.0, "sequence_tis_cap": 2.0}, "set one of them"),
        ({"m2_threshold": 0.1}, "m2_threshold is of m2po"),
        ({"token_mean": "prompt"}, "token_mean is of dapo"),
        ({"reference": "x"}, "reference is of the KL penalty"),
        ({"kl_estimator": "k2"}, "kl_estimator is of the KL penalty"),
        ({"kl_in": "reward"}, "kl_in is of the KL penalty"),
        ({"algorithm": "sft", "kl_coef": 0.1, "kl_in": "reward"}, "sft trains without rewards"),
        ({"algorithm": "distill", "teacher": "x", "credit": "turn"}, "distill trains without"),
        ({"algorithm": "maxrl", "kl_coef": 0.1, "kl_in": "reward"}, "maxrl divides by the mean reward"),
        ({"algorithm": "distill"}, "distill needs a `teacher`"),
        ({"teacher": "x"}, "teacher is of distill"),
        ({"algorithm": "sft", "control": "shuffled_advantages"}, "control shuffles advantages"),
        ({"sft_min_reward": 0.5}, "sft_min_reward is of sft"),
        ({"algorithm": "ppo", "credit": "turn"}, "ppo gives every token its own credit"),
        ({"step_weight": 2.0}, "step_weight is of credit"),
        ({"length_norm_tokens": 9}, "length_norm_tokens is of dr_grpo"),
        ({"algorithm": "rloo", "advantage_eps": 0.1}, "rloo divides by none"),
        ({"algorithm": "decoupled_ppo", "clip_high": 0.3}, "with updates_per_batch = 1 there is nothing to clip"),
        ({"sft_coef": 0.1, "control": "shuffled_advantages"}, "sft_coef learns from rewards all the same"),
    ],
)
def test_keys_that_would_change_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**settings)


def test_a_config_survives_its_own_dump() -> None:
    for config in (
        TrainerConfig(),
        TrainerConfig(algorithm="sapo", sapo_tau_negative=2.0, sequence_mask_high=1.1),
        TrainerConfig(algorithm="m2po", m2_threshold=0.1, kl_coef=0.1, kl_in="reward", sft_coef=0.1, sft_min_reward=2),
        TrainerConfig(algorithm="distill", teacher="x", token_mean="prompt"),
    ):
        assert TrainerConfig(**config.model_dump(mode="json")) == config


def test_defaults_depend_on_the_algorithm() -> None:
    assert LossConfig.resolve(TrainerConfig(algorithm="grpo"), context_tokens=99).clip_high == 0.2
    assert LossConfig.resolve(TrainerConfig(algorithm="dapo"), context_tokens=99).clip_high == 0.28
    assert LossConfig.resolve(TrainerConfig(algorithm="dapo", clip_high=0.5), context_tokens=99).clip_high == 0.5
    assert LossConfig.resolve(TrainerConfig(), context_tokens=99).length_norm_tokens == 99
    assert (
        LossConfig.resolve(
            TrainerConfig(algorithm="dr_grpo", length_norm_tokens=7), context_tokens=99
        ).length_norm_tokens
        == 7
    )


def test_corrections_and_penalties_are_resolved() -> None:
    config = TrainerConfig(tis_cap=2, mis_high=5, sequence_mis_low=0.5, sequence_mask_low=0.9, kl_coef=0.1)
    found = LossConfig.resolve(config, context_tokens=9)
    assert found.corrections == Corrections(
        tis_cap=2, mis=(0, 5), sequence_mis=(0.5, math.inf), sequence_mask=(0.9, math.inf)
    )
    assert found.kl == KlPenalty(0.1, "k3", "loss")
    in_reward = LossConfig.resolve(TrainerConfig(kl_coef=0.1, kl_in="reward"), context_tokens=9)
    assert in_reward.kl == KlPenalty(0.1, "k1", "reward")
    assert LossConfig.resolve(TrainerConfig(algorithm="sft"), context_tokens=9).sft_coef == 1.0


def test_what_learns_from_groups_of_equal_rewards() -> None:
    assert not TrainerConfig().learns_from_equal_rewards
    assert not TrainerConfig(credit="turn").learns_from_equal_rewards  # what is equal there is the buffer's question
    assert not TrainerConfig(kl_coef=0.1).learns_from_equal_rewards
    penalised: dict[str, Any] = {"kl_coef": 0.1, "kl_in": "reward"}
    choices: list[dict[str, Any]] = [{"algorithm": "sft"}, {"algorithm": "ppo"}, {"sft_coef": 0.1}, penalised]
    for settings in choices:
        assert TrainerConfig(**settings).learns_from_equal_rewards, settings
