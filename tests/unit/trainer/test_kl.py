"""KL penalties by hand: values, and whose gradient each estimator has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wingbeat.trainer.kl import Estimator, kl_estimate, kl_term
from wingbeat.trainer.loss_config import Corrections, KlPenalty, LossConfig
from wingbeat.trainer.loss_stats import token_stats
from wingbeat.trainer.losses import policy_loss
from wingbeat.trainer.token_batch import TokenBatch

MakeTokens = Callable[..., TokenBatch]
ESTIMATORS: list[Estimator] = ["k1", "k2", "k3"]


def _config(estimator: Estimator, *, coef: float = 0.5, corrections: Corrections | None = None) -> LossConfig:
    return LossConfig(
        "grpo",
        clip_low=0.2,
        clip_high=0.2,
        length_norm_tokens=8,
        kl=KlPenalty(coef, estimator),
        corrections=corrections or Corrections(),
    )


def _gradient(tokens: TokenBatch, config: LossConfig) -> list[float]:
    (gradient_N,) = torch.autograd.grad(policy_loss(tokens, config=config), tokens.policy_logprobs_N)
    return gradient_N.tolist()


def test_estimates_by_hand() -> None:
    """log policy - log reference = 2 and -1."""
    policy_N, reference_N = torch.tensor([-1.0, -3.0]), torch.tensor([-3.0, -2.0])
    assert kl_estimate(policy_N, reference_N, estimator="k1").tolist() == [2.0, -1.0]
    assert kl_estimate(policy_N, reference_N, estimator="k2").tolist() == [2.0, 0.5]
    expected = [math.exp(-2) - 1 + 2, math.e - 1 - 1]
    assert kl_estimate(policy_N, reference_N, estimator="k3").tolist() == pytest.approx(expected)


def test_a_token_that_the_reference_excludes_stays_finite() -> None:
    policy_N, reference_N = torch.tensor([-1.0]), torch.tensor([-math.inf])
    for estimator in ESTIMATORS:
        assert math.isfinite(kl_estimate(policy_N, reference_N, estimator=estimator).item())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_estimate_the_divergence_without_bias(estimator: Estimator) -> None:
    policy_V, reference_V = _distributions()
    exact = (policy_V.exp() * (policy_V - reference_V)).sum().item()
    found_V = kl_estimate(policy_V, reference_V, estimator=estimator)
    assert (policy_V.exp() * found_V).sum().item() == pytest.approx(exact, abs=1e-12)


def _distributions() -> tuple[Tensor, Tensor]:
    return tuple(
        torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
        for logits in ([0.3, -1.0, 0.8, 0.0], [1.0, 0.2, -0.5, 0.1])
    )  # type: ignore[return-value]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("sampler", ["policy", "stale"])
def test_whose_gradient_each_has_in_the_loss(estimator: Estimator, sampler: str) -> None:
    """In expectation over the sampler's tokens, weighted by importance: k1 and k2 that of KL(policy || reference),
    k3 that of KL(reference || policy)."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    policy_V, reference_V = torch.log_softmax(logits_V, -1), _distributions()[1]
    stale_V = torch.log_softmax(torch.tensor([0.0, 0.5, 0.0, -0.5], dtype=torch.float64), -1)
    sampling_V = policy_V.detach() if sampler == "policy" else stale_V
    weight_V = (policy_V.detach() - sampling_V).exp()
    terms_V = kl_term(policy_V, reference_V, weight_N=weight_V, estimator=estimator)
    (got,) = torch.autograd.grad((sampling_V.exp() * terms_V).sum(), logits_V, retain_graph=True)
    reverse = (policy_V.exp() * (policy_V - reference_V)).sum()
    forward = (reference_V.exp() * (reference_V - policy_V)).sum()
    (wanted,) = torch.autograd.grad(forward if estimator == "k3" else reverse, logits_V)
    assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


def test_k1_differentiated_as_it_stands_would_train_nothing() -> None:
    """Why its term goes through the ratio: the expectation of grad log pi is zero."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    policy_V = torch.log_softmax(logits_V, -1)
    plain = (policy_V.detach().exp() * kl_estimate(policy_V, _distributions()[1], estimator="k1")).sum()
    (gradient,) = torch.autograd.grad(plain, logits_V)
    assert gradient.abs().max().item() < 1e-15


def test_penalties_in_the_loss_by_hand(make_tokens: MakeTokens) -> None:
    """On-policy, x = log policy - log reference = -1 and 0.5, weights 1 and 1/2, coefficient 1/2, no advantage."""
    reference = torch.tensor([-1.0, -2.5], dtype=torch.float64)
    tokens = make_tokens([1.0, 1.0], [0.0, 0.0], weights=[1.0, 0.5], reference_N=reference)
    values = {"k1": [-1.0, 0.5], "k2": [0.5, 0.125], "k3": [math.e - 2, math.exp(-0.5) - 0.5]}
    slopes = {"k1": [0.0, 1.5], "k2": [-1.0, 0.5], "k3": [1 - math.e, 1 - math.exp(-0.5)]}
    for estimator in ESTIMATORS:
        config = _config(estimator)
        first, second = values[estimator]
        assert policy_loss(tokens, config=config).item() == pytest.approx(0.5 * (first + second / 2)), estimator
        first, second = slopes[estimator]
        assert _gradient(tokens, config) == pytest.approx([0.5 * first, 0.25 * second]), estimator
    assert token_stats(tokens, config=_config("k1")).metrics()["kl"] == pytest.approx(sum(values["k3"]) / 2)


def test_stale_tokens_weigh_their_importance_up_to_the_cap(make_tokens: MakeTokens) -> None:
    """x = log 3, ratio 3: k2's slope is 3 log 3, or 2 log 3 under a cap of 2."""
    tokens = make_tokens([3.0], [0.0], reference_N=torch.tensor([-2.0], dtype=torch.float64))
    assert _gradient(tokens, _config("k2")) == pytest.approx([0.5 * 3 * math.log(3)])
    capped = _config("k2", corrections=Corrections(tis_cap=2.0))
    assert _gradient(tokens, capped) == pytest.approx([0.5 * 2 * math.log(3)])


def test_a_penalty_in_the_reward_is_no_term_of_the_loss(make_tokens: MakeTokens) -> None:
    tokens = make_tokens([1.0], [0.0], reference_N=torch.tensor([-1.0], dtype=torch.float64))
    config = replace(_config("k1"), kl=KlPenalty(0.5, "k1", "reward"))
    assert policy_loss(tokens, config=config).item() == 0.0
    assert token_stats(tokens, config=config).metrics()["kl"] == pytest.approx(math.e - 2)
