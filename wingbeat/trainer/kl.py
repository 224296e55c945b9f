"""The KL divergence of the policy from a reference: its estimators, as a term of the loss and as a penalty on rewards.

With ``x = log policy - log reference`` of a sampled token (Schulman 2020, "Approximating KL divergence")::

    k1 = x                   without bias, may be negative
    k2 = x^2 / 2             biased, small variance
    k3 = exp(-x) - 1 + x     without bias, never negative; eq. 4 of arXiv 2402.03300

A good estimate of the value need not have the gradient of the value, because the tokens were drawn from the policy
itself.  What each trains, in expectation over the policy's tokens (Tang and Munos 2025, arXiv 2506.09477; Liu et al.
2025, arXiv 2510.01555), is

=========  ==================================  ==============================================================
estimator  in the loss                         in the reward (a factor of grad log pi, no gradient of its own)
=========  ==================================  ==============================================================
k1         as it stands zero: grad log pi,     the gradient of KL(policy || reference)
           so here through the ratio (below)
k2         the gradient of KL(policy || ref)   another, biased
k3         that of KL(reference || policy)     another, biased
=========  ==================================  ==============================================================

Off-policy those expectations need each token's importance: every term is weighted by that of the rollout correction,
``w = sg(min(c, cap))``, 1 on-policy.  For k1 the gradient of that importance is the whole point: the term is
``w x rho / sg(rho)``, whose value is ``w x`` and whose gradient is ``w (1 + x) grad log pi``.

Letters: ``N`` trained tokens.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from wingbeat.trainer.token_batch import log_ratio

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(policy_N: Tensor, reference_N: Tensor, *, estimator: Estimator) -> Tensor:
    """[N] of each token; log-ratios are cut at +-20."""
    x_N = log_ratio(policy_N, reference_N)
    match estimator:
        case "k1":
            return x_N
        case "k2":
            return x_N.square() / 2
        case "k3":
            return torch.expm1(-x_N) + x_N
        case _:
            assert_never(estimator)


def kl_term(policy_N: Tensor, reference_N: Tensor, *, weight_N: Tensor, estimator: Estimator) -> Tensor:
    """[N] what the loss adds for each token, before the coefficient."""
    found_N = kl_estimate(policy_N, reference_N, estimator=estimator)
    if estimator == "k1":
        found_N = found_N * (policy_N - policy_N.detach()).exp()
    return weight_N * found_N
