"""Every loss by hand, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from wingbeat.core.config.schema import Algorithm, TrainerConfig
from wingbeat.trainer.losses import (
    LossConfig,
    TokenBatch,
    TokenStats,
    Totals,
    policy_loss,
    token_stats,
    token_weight,
)

TOTALS = Totals(num_episodes=2, num_tokens=4)


def _config(algorithm: Algorithm = "grpo", *, length_norm_tokens: int = 8) -> LossConfig:
    return LossConfig(algorithm=algorithm, clip_low=0.2, clip_high=0.3, length_norm_tokens=length_norm_tokens)


def _tokens(
    ratios: list[float], advantages: list[float], *, weights: list[float] | None = None, on_policy: bool = True
) -> TokenBatch:
    count = len(ratios)
    return TokenBatch(
        policy_logprobs_N=torch.log(torch.tensor(ratios, dtype=torch.float64)).sub(2.0).requires_grad_(),
        sampling_logprobs_N=torch.full((count,), -2.0, dtype=torch.float64),
        entropy_N=torch.arange(count, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        weights_N=torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        on_policy_N=torch.full((count,), on_policy),
    )


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # Episode a: advantage 1, three tokens of ratio 1.  Episode b: advantage -2, one token of ratio 1.1.
        ("reinforce", -(3 * 1 - 2.2) / 2),
        ("rloo", -(3 * 1 - 2.2) / 2),
        ("grpo", -(1 - 2.2) / 2),
        ("dr_grpo", -(3 * 1 - 2.2) / (2 * 8)),
        ("dapo", -(3 * 1 - 2.2) / 4),
    ],
)
def test_aggregation_by_hand(algorithm: Algorithm, expected: float) -> None:
    config = _config(algorithm)
    long = token_weight(config, episode_tokens=3, totals=TOTALS)
    short = token_weight(config, episode_tokens=1, totals=TOTALS)
    tokens = _tokens([1, 1, 1, 1.1], [1, 1, 1, -2], weights=[long] * 3 + [short])
    assert policy_loss(tokens, config=config).item() == pytest.approx(expected, abs=1e-12)


def test_clip_by_hand() -> None:
    """Clip range [0.8, 1.3]: only a gain beyond it in the direction of the advantage is cut."""
    ratios = [1.5, 0.5, 1.5, 0.5, 1.0]
    advantages = [2.0, 2.0, -2.0, -2.0, 2.0]
    tokens = _tokens(ratios, advantages)
    loss = policy_loss(tokens, config=_config())
    #       cut: 1.3*2   kept: .5*2   kept: 1.5*-2   cut: .8*-2   kept: 1*2
    assert loss.item() == pytest.approx(-(2.6 + 1.0 - 3.0 - 1.6 + 2.0))
    loss.backward()
    # d rho / d logp = rho, so the gradient is -rho * A where kept and 0 where cut.
    assert tokens.policy_logprobs_N.grad is not None
    assert tokens.policy_logprobs_N.grad.tolist() == pytest.approx([0.0, -1.0, 3.0, 0.0, -2.0])


@pytest.mark.parametrize("algorithm", ["reinforce", "rloo"])
def test_on_policy_gradient_is_the_plain_policy_gradient(algorithm: Algorithm) -> None:
    tokens = _tokens([1.0, 1.0], [3.0, -0.5])
    policy_loss(tokens, config=_config(algorithm)).backward()
    assert tokens.policy_logprobs_N.grad is not None
    assert tokens.policy_logprobs_N.grad.tolist() == pytest.approx([-3.0, 0.5])


def test_a_wild_ratio_stays_finite_in_float32() -> None:
    tokens = TokenBatch(
        policy_logprobs_N=torch.tensor([-0.1, -200.0], requires_grad=True),
        sampling_logprobs_N=torch.tensor([-200.0, -0.1]),
        entropy_N=torch.zeros(2),
        advantages_N=torch.tensor([-1.0, 1.0]),
        weights_N=torch.ones(2),
        on_policy_N=torch.zeros(2, dtype=torch.bool),
    )
    loss = policy_loss(tokens, config=_config())
    loss.backward()
    assert torch.isfinite(loss)
    assert tokens.policy_logprobs_N.grad is not None
    assert torch.isfinite(tokens.policy_logprobs_N.grad).all()


def test_statistics_by_hand() -> None:
    tokens = _tokens([1.5, 0.5, 1.5, 0.5], [1, -1, -1, 1])
    metrics = token_stats(tokens, config=_config()).metrics()
    kl = (2 * (1.5 - 1 - math.log(1.5)) + 2 * (0.5 - 1 - math.log(0.5))) / 4
    assert metrics == pytest.approx(
        {
            "entropy": 1.5,
            "mismatch_kl": kl,
            "clip_ratio/low": 0.25,
            "clip_ratio/high": 0.25,
            "ratio/max": 1.5,
            "mismatch_kl/on_policy": kl,
            "max_abs_logprob_diff": math.log(2),
        }
    )


def test_statistics_of_stale_tokens_say_nothing_about_numerics() -> None:
    metrics = token_stats(_tokens([1.5], [1.0], on_policy=False), config=_config()).metrics()
    assert metrics["mismatch_kl"] > 0
    assert "max_abs_logprob_diff" not in metrics
    assert "mismatch_kl/on_policy" not in metrics


def test_statistics_add_up_over_parts() -> None:
    whole = token_stats(_tokens([1.5, 0.5, 1.0], [1, -1, 1]), config=_config())
    first = token_stats(_tokens([1.5], [1]), config=_config())
    second = token_stats(_tokens([0.5, 1.0], [-1, 1]), config=_config())
    summed = first + second + TokenStats()
    assert summed.metrics() | {"entropy": 0} == pytest.approx(whole.metrics() | {"entropy": 0})
    assert TokenStats().metrics() == {}


def test_defaults_depend_on_the_algorithm() -> None:
    assert LossConfig.resolve(TrainerConfig(algorithm="grpo"), context_tokens=99).clip_high == 0.2
    assert LossConfig.resolve(TrainerConfig(algorithm="dapo"), context_tokens=99).clip_high == 0.28
    assert LossConfig.resolve(TrainerConfig(algorithm="dapo", clip_high=0.5), context_tokens=99).clip_high == 0.5
    assert LossConfig.resolve(TrainerConfig(), context_tokens=99).length_norm_tokens == 99
    assert LossConfig.resolve(TrainerConfig(length_norm_tokens=7), context_tokens=99).length_norm_tokens == 7
