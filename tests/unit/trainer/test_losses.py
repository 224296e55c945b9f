"""Every loss by hand, and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

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
    ratios: list[float],
    advantages: list[float],
    *,
    weights: list[float] | None = None,
    sequences: list[int] | None = None,
    on_policy: bool = True,
) -> TokenBatch:
    count = len(ratios)
    return TokenBatch(
        policy_logprobs_N=torch.log(torch.tensor(ratios, dtype=torch.float64)).sub(2.0).requires_grad_(),
        sampling_logprobs_N=torch.full((count,), -2.0, dtype=torch.float64),
        entropy_N=torch.arange(count, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        weights_N=torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        sequences_N=torch.tensor(sequences or range(count)),
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
        ("reinforce_plus_plus", -(1 - 2.2) / 2),
        ("gspo", -(1 - 2.2) / 2),
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


def _gradient(tokens: TokenBatch, config: LossConfig) -> list[float]:
    (gradient_N,) = torch.autograd.grad(policy_loss(tokens, config=config), tokens.policy_logprobs_N)
    return gradient_N.tolist()


def _differences(tokens: TokenBatch, config: LossConfig, *, step: float = 1e-6) -> list[float]:
    """The gradient by central differences."""

    def loss(index: int, shift: float) -> float:
        logprobs_N = tokens.policy_logprobs_N.detach().clone()
        logprobs_N[index] += shift
        return policy_loss(replace(tokens, policy_logprobs_N=logprobs_N), config=config).item()

    return [(loss(i, step) - loss(i, -step)) / (2 * step) for i in range(len(tokens.weights_N))]


def test_cispo_by_hand() -> None:
    """The weight is cut to [0.8, 1.3] whatever the sign of the advantage, and no token loses its gradient."""
    tokens = _tokens([1.5, 0.5, 1.5, 0.5, 1.0], [2.0, 2.0, -2.0, -2.0, 2.0], weights=[1, 1, 1, 1, 0.5])
    config = _config("cispo")
    logprobs = [math.log(ratio) - 2 for ratio in (1.5, 0.5, 1.5, 0.5, 1.0)]
    coefficients = [1.3 * 2, 0.8 * 2, 1.3 * -2, 0.8 * -2, 0.5 * 2]
    expected = -sum(a * b for a, b in zip(coefficients, logprobs, strict=True))
    assert policy_loss(tokens, config=config).item() == pytest.approx(expected)
    assert _gradient(tokens, config) == pytest.approx([-value for value in coefficients])
    metrics = token_stats(tokens, config=config).metrics()
    assert (metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == (0.4, 0.4)


def test_gspo_by_hand() -> None:
    """Turns of ratios (4, 1/4, 1) and (1.2, 1.2 * 1.21): geometric means 1 and 1.32, the latter is cut at 1.3."""
    ratios, turns = [4.0, 0.25, 1.0, 1.2, 1.2 * 1.21], [0, 0, 0, 1, 1]
    weights = [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]
    config = _config("gspo")
    gain = _tokens(ratios, [2, 2, 2, 3, 3], weights=weights, sequences=turns)
    assert policy_loss(gain, config=config).item() == pytest.approx(-(2.0 + 1.3 * 3))
    assert _gradient(gain, config) == pytest.approx([-2 / 3, -2 / 3, -2 / 3, 0, 0])
    assert token_stats(gain, config=config).metrics()["clip_ratio/high"] == 0.4
    blame = _tokens(ratios, [2, 2, 2, -3, -3], weights=weights, sequences=turns)
    assert policy_loss(blame, config=config).item() == pytest.approx(-(2.0 - 1.32 * 3))
    assert _gradient(blame, config) == pytest.approx([-2 / 3, -2 / 3, -2 / 3, 1.98, 1.98])
    assert _gradient(blame, config) == pytest.approx(_differences(blame, config), abs=1e-7)


def test_gspo_with_the_product_of_ratios_by_hand() -> None:
    tokens = _tokens([1.1, 1.1, 0.9], [1, 1, -2], weights=[0.5, 0.5, 1.0], sequences=[0, 0, 1])
    config = replace(_config("gspo"), sequence_ratio="product")
    assert policy_loss(tokens, config=config).item() == pytest.approx(-(1.21 - 1.8))
    assert _gradient(tokens, config) == pytest.approx([-1.21, -1.21, 1.8])
    assert _gradient(tokens, config) == pytest.approx(_differences(tokens, config), abs=1e-7)


def test_sapo_by_hand() -> None:
    """tau 1 above, 2 below: 4/1 * sigmoid(1 * 0.5) * 3 and 4/2 * sigmoid(2 * 0.5) * -3."""
    tokens = _tokens([1.5, 1.5, 1.0, 1.0], [3.0, -3.0, 3.0, -3.0])
    config = replace(_config("sapo"), sapo_taus=(1.0, 2.0))
    above, below = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-1.0))
    gains = [4 * above * 3, 2 * below * -3, 4 * 0.5 * 3, 2 * 0.5 * -3]
    assert policy_loss(tokens, config=config).item() == pytest.approx(-sum(gains))
    # d gain / d logp = 4 p (1 - p) rho A; on-policy A, whatever tau.
    faded = [4 * above * (1 - above) * 1.5 * 3, 4 * below * (1 - below) * 1.5 * -3, 3.0, -3.0]
    assert _gradient(tokens, config) == pytest.approx([-value for value in faded])
    assert _gradient(tokens, config) == pytest.approx(_differences(tokens, config), abs=1e-7)


def test_truncated_importance_sampling_by_hand() -> None:
    """Cap 2: what is blamed at ratio 5 weighs 2, not 5; a ratio below the cap stays; a clipped one stays clipped."""
    tokens = _tokens([5.0, 1.5, 5.0, 0.5], [-1.0, -1.0, 1.0, 1.0])
    config = replace(_config(), tis_cap=2.0)
    assert _gradient(tokens, config) == pytest.approx([2.0, 1.5, 0.0, -0.5])
    assert _gradient(tokens, _config()) == pytest.approx([5.0, 1.5, 0.0, -0.5])
    assert token_stats(tokens, config=config).metrics()["correction/capped"] == 0.5


def test_sequence_mask_by_hand() -> None:
    """Turns with geometric means 1 (of 2 and 1/2), 1.5 and 0.6 against bounds 0.7 and 1.4: one is trained."""
    tokens = _tokens([2.0, 0.5, 1.5, 0.6], [-1.0, -1.0, -1.0, 1.0], sequences=[0, 0, 1, 2])
    config = replace(_config(), sequence_mask=(0.7, 1.4))
    assert _gradient(tokens, config) == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert policy_loss(tokens, config=config).item() == pytest.approx(2.0 + 0.8)
    assert token_stats(tokens, config=config).metrics()["correction/masked"] == 0.5
    one_sided = replace(config, sequence_mask=(0.0, 1.4))
    assert _gradient(tokens, one_sided) == pytest.approx([2.0, 0.0, 0.0, -0.6])


@pytest.mark.parametrize("algorithm", ["grpo", "cispo", "gspo", "sapo"])
def test_turns_may_be_split_over_forwards_in_any_order(algorithm: Algorithm) -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = (0.2 * torch.randn(9, generator=generator, dtype=torch.float64)).exp()
    turns = [0, 0, 0, 1, 2, 2, 3, 3, 3]
    advantages = [1.0, 1, 1, -1, 2, 2, -2, -2, -2]
    config = replace(_config(algorithm), sequence_mask=(0.8, 1.2))
    whole = _gradient(_tokens(ratios.tolist(), advantages, sequences=turns), config)
    found = [math.nan] * 9
    for part in ([6, 7, 8, 0, 1, 2], [4, 5], [3]):
        tokens = _tokens(
            [ratios[p].item() for p in part], [advantages[p] for p in part], sequences=[turns[p] for p in part]
        )
        for place, value in zip(part, _gradient(tokens, config), strict=True):
            found[place] = value
    assert found == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("algorithm", ["reinforce", "rloo", "reinforce_plus_plus", "cispo", "gspo", "sapo"])
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
        sequences_N=torch.arange(2),
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
            "correction/capped": 0.0,
            "correction/masked": 0.0,
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


def _clip(**settings: Any) -> tuple[float, float]:
    found = LossConfig.resolve(TrainerConfig(**settings), context_tokens=99)
    return found.clip_low, found.clip_high


def test_clip_defaults_depend_on_the_algorithm() -> None:
    assert _clip(algorithm="grpo") == (0.2, 0.2)
    assert _clip(algorithm="cispo") == (1.0, 4.0)
    assert _clip(algorithm="cispo", clip_low=0.5) == (0.5, 4.0)
    assert _clip(algorithm="gspo") == (3e-4, 4e-4)
    assert _clip(algorithm="gspo", sequence_ratio="product") == (0.2, 0.2)
    assert _clip(algorithm="sapo") == (1.0, math.inf)


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
    ],
)
def test_keys_that_would_change_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**settings)


def test_a_config_survives_its_own_dump() -> None:
    for config in (TrainerConfig(), TrainerConfig(algorithm="sapo", sapo_tau_negative=2.0, sequence_mask_high=1.1)):
        assert TrainerConfig(**config.model_dump(mode="json")) == config


def test_defaults_depend_on_the_algorithm() -> None:
    assert LossConfig.resolve(TrainerConfig(algorithm="grpo"), context_tokens=99).clip_high == 0.2
    assert LossConfig.resolve(TrainerConfig(algorithm="dapo"), context_tokens=99).clip_high == 0.28
    assert LossConfig.resolve(TrainerConfig(algorithm="dapo", clip_high=0.5), context_tokens=99).clip_high == 0.5
    assert LossConfig.resolve(TrainerConfig(), context_tokens=99).length_norm_tokens == 99
    assert LossConfig.resolve(TrainerConfig(length_norm_tokens=7), context_tokens=99).length_norm_tokens == 7
