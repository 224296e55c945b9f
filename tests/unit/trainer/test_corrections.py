"""Rollout correction by hand: what a gradient weighs, and what is taken out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from wingbeat.core.config.trainer import Algorithm, TrainerConfig
from wingbeat.trainer.corrections import correction_weight
from wingbeat.trainer.loss_config import Corrections, LossConfig
from wingbeat.trainer.loss_stats import token_stats
from wingbeat.trainer.losses import policy_loss
from wingbeat.trainer.token_batch import TokenBatch

MakeTokens = Callable[..., TokenBatch]


def _config(corrections: Corrections, algorithm: Algorithm = "grpo") -> LossConfig:
    return LossConfig(algorithm, clip_low=0.2, clip_high=0.3, length_norm_tokens=8, corrections=corrections)


def _gradient(tokens: TokenBatch, config: LossConfig) -> list[float]:
    (gradient_N,) = torch.autograd.grad(policy_loss(tokens, config=config), tokens.policy_logprobs_N)
    return gradient_N.tolist()


def _metrics(tokens: TokenBatch, config: LossConfig) -> dict[str, float]:
    return token_stats(tokens, config=config).metrics()


def test_token_truncation(make_tokens: MakeTokens) -> None:
    """Cap 2: what is blamed at ratio 5 weighs 2, not 5; a ratio below the cap stays; a clipped one stays clipped."""
    tokens = make_tokens([5.0, 1.5, 5.0, 0.5], [-1.0, -1.0, 1.0, 1.0])
    config = _config(Corrections(tis_cap=2.0))
    assert _gradient(tokens, config) == pytest.approx([2.0, 1.5, 0.0, -0.5])
    assert _gradient(tokens, _config(Corrections())) == pytest.approx([5.0, 1.5, 0.0, -0.5])
    assert _metrics(tokens, config)["correction/capped"] == 0.5


def test_sequence_truncation(make_tokens: MakeTokens) -> None:
    """Turns of products 1.2 * 1.25 = 1.5 and 0.9 * 0.5 = 0.45, cap 1.4: every token weighs min(product, cap)."""
    tokens = make_tokens([1.2, 1.25, 0.9, 0.5], [1.0, 1.0, 1.0, 2.0], sequences=[0, 0, 1, 1])
    config = _config(Corrections(sequence_tis_cap=1.4))
    assert _gradient(tokens, config) == pytest.approx([-1.4, -1.4, -0.45, -0.9])
    assert _metrics(tokens, config)["correction/capped"] == 0.5
    clipped = make_tokens([1.4, 1.0], [1.0, 1.0], sequences=[0, 0])
    assert _gradient(clipped, config) == pytest.approx([0.0, -1.4]), "the token's own ratio is clipped as ever"


def test_token_masks(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([0.4, 0.5, 1.0, 2.0, 2.1], [-1.0] * 5)
    config = _config(Corrections(mis=(0.49, 2.01)))
    assert _gradient(tokens, config) == pytest.approx([0.0, 0.0, 1.0, 2.0, 0.0]), "0.5 is kept, and cut by the clip"
    metrics = _metrics(tokens, config)
    assert metrics["correction/masked"] == metrics["correction/mis"] == 0.4
    assert "correction/sequence_mis" not in metrics


def test_sequence_masks_by_the_product(make_tokens: MakeTokens) -> None:
    """Products 1.1^3 = 1.331 and 0.9^2 = 0.81 against 0.8 and 1.3: no token is far, the first turn is."""
    tokens = make_tokens([1.1, 1.1, 1.1, 0.9, 0.9], [1.0] * 5, sequences=[0, 0, 0, 1, 1])
    config = _config(Corrections(sequence_mis=(0.8, 1.3)))
    assert _gradient(tokens, config) == pytest.approx([0.0, 0.0, 0.0, -0.9, -0.9])
    assert _metrics(tokens, config)["correction/sequence_mis"] == 0.6


def test_sequence_masks_by_the_geometric_mean(make_tokens: MakeTokens) -> None:
    """Turns with geometric means 1 (of 2 and 1/2), 1.5 and 0.6 against bounds 0.7 and 1.4: one is trained."""
    tokens = make_tokens([2.0, 0.5, 1.5, 0.6], [-1.0, -1.0, -1.0, 1.0], sequences=[0, 0, 1, 2])
    config = _config(Corrections(sequence_mask=(0.7, 1.4)))
    assert _gradient(tokens, config) == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert policy_loss(tokens, config=config).item() == pytest.approx(2.0 + 0.8)
    metrics = _metrics(tokens, config)
    assert metrics["correction/masked"] == metrics["correction/sequence_mask"] == 0.5
    one_sided = _config(Corrections(sequence_mask=(0.0, 1.4)))
    assert _gradient(tokens, one_sided) == pytest.approx([2.0, 0.0, 0.0, -0.6])


def test_masks_of_several_kinds_are_counted_apart_and_once(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([3.0, 3.0, 1.0], [-1.0] * 3, sequences=[0, 1, 1])
    metrics = _metrics(tokens, _config(Corrections(mis=(0.0, 2.0), sequence_mask=(0.0, 2.0))))
    assert metrics["correction/mis"] == pytest.approx(2 / 3)
    assert metrics["correction/sequence_mask"] == pytest.approx(1 / 3)
    assert metrics["correction/masked"] == pytest.approx(2 / 3)


def test_decoupled_losses_correct_the_ratio_of_proximal_to_sampling(make_tokens: MakeTokens) -> None:
    """Policy / proximal is 1.2 everywhere and does not count here; proximal / sampling is 3, 1 and 0.2."""
    behaviour = [3.0, 1.0, 0.2]
    proximal = torch.tensor(behaviour, dtype=torch.float64).log() - 2
    tokens = make_tokens([1.2 * c for c in behaviour], [1.0] * 3, proximal_N=proximal, sequences=[0, 0, 1])
    masked = _config(Corrections(mis=(0.5, 2.0)), "decoupled_ppo")
    assert _gradient(tokens, masked) == pytest.approx([0.0, -1.2, 0.0])
    sequence = _config(Corrections(sequence_tis_cap=2.0), "decoupled_ppo")
    assert correction_weight(tokens, config=sequence).tolist() == pytest.approx([2.0, 2.0, 0.2])
    assert _gradient(tokens, sequence) == pytest.approx([-2.4, -2.4, -0.24])


def test_masked_tokens_have_no_kl_term_but_keep_their_entropy_and_cross_entropy(make_tokens: MakeTokens) -> None:
    reference = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    tokens = make_tokens([1.0, 9.0], [1.0, 1.0], reference_N=reference, sft_weights=[0.5, 0.5])
    config = LossConfig.resolve(
        TrainerConfig(mis_high=2.0, kl_coef=0.1, entropy_coef=0.2, sft_coef=1.0), context_tokens=8
    )
    loss = policy_loss(tokens, config=config)
    grads, entropy_grads = torch.autograd.grad(loss, [tokens.policy_logprobs_N, tokens.entropy_N])
    # k3: 1 - reference / policy; policy -2 and reference -1.
    assert grads.tolist() == pytest.approx([-1.0 + 0.1 * (1 - math.e) - 0.5, -0.5])
    assert entropy_grads.tolist() == pytest.approx([-0.2, -0.2])


def test_wild_ratios_stay_finite_in_float32(make_tokens: MakeTokens) -> None:
    found = make_tokens([1.0, 1.0], [-1.0, 1.0], sequences=[0, 0])
    tokens = replace(
        found,
        policy_logprobs_N=torch.tensor([-0.1, -200.0], requires_grad=True),
        sampling_logprobs_N=torch.tensor([-200.0, -0.1]),
        advantages_N=found.advantages_N.float(),
        weights_N=found.weights_N.float(),
    )
    for corrections in (Corrections(tis_cap=2.0), Corrections(sequence_tis_cap=2.0), Corrections(mis=(0.1, 10.0))):
        for algorithm in ("grpo", "decoupled_ppo", "m2po"):
            gradient = _gradient(tokens, _config(corrections, algorithm))
            assert all(map(math.isfinite, gradient)), (corrections, algorithm)
