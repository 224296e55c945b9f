"""The loss against its formula written plainly, token by token, with numbers in place of stopped gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from wingbeat.core.config.trainer import OWN_RATIO_BOUND, Algorithm, TrainerConfig
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.losses import policy_loss
from wingbeat.trainer.token_batch import TokenBatch

TURNS = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
TERMS: list[dict[str, Any]] = [
    {},
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.1},
    {"kl_coef": 0.3, "sft_coef": 0.5},
    {"tis_cap": 1.1, "mis_low": 0.8, "mis_high": 1.3, "kl_coef": 0.3},
    {"sequence_tis_cap": 1.2, "sequence_mis_low": 0.6, "sequence_mis_high": 1.6},
    {"sequence_mask_low": 0.9, "sequence_mask_high": 1.15, "kl_coef": 0.2},
]


def _tokens(make_tokens: Callable[..., TokenBatch], seed: int, config: LossConfig) -> TokenBatch:
    rng = np.random.default_rng(seed)
    count = len(TURNS)

    def near() -> np.ndarray:
        return rng.normal(-2.0, 0.15, count)

    return make_tokens(
        np.exp(rng.normal(0, 0.2, count)).tolist(),
        rng.normal(0, 1, count).tolist(),
        weights=rng.uniform(0.1, 1, count).tolist(),
        sequences=TURNS,
        sft_weights=rng.uniform(0, 1, count).tolist() if config.sft_coef else None,
        proximal_N=near(),
        reference_N=near(),
        teacher_N=near(),
        **({"kept_N": rng.random(count) < 0.7} if config.algorithm == "m2po" else {}),
    )


def _plain(tokens: TokenBatch, config: LossConfig) -> Tensor:
    """Loops over turns and tokens; ``.item()`` stops a gradient."""
    logp, entropy = list(tokens.policy_logprobs_N), list(tokens.entropy_N)
    sampling, scores = tokens.sampling_logprobs_N.tolist(), tokens.scores
    assert scores.proximal_N is not None and scores.reference_N is not None and scores.teacher_N is not None
    proximal, reference, teacher = (v.tolist() for v in (scores.proximal_N, scores.reference_N, scores.teacher_N))
    kept = [True] * len(TURNS) if scores.kept_N is None else scores.kept_N.tolist()
    weights, advantages = tokens.weights_N.tolist(), tokens.advantages_N.tolist()
    decoupled = config.algorithm == "decoupled_ppo"
    total = torch.zeros((), dtype=torch.float64)
    for turn in sorted(set(TURNS)):
        places = [n for n, t in enumerate(TURNS) if t == turn]
        above = proximal if decoupled else [value.item() for value in logp]
        log_c = {n: above[n] - sampling[n] for n in places}
        product = math.exp(sum(log_c.values()))
        geometric = math.exp(sum(log_c.values()) / len(places))
        for n in places:
            c = math.exp(log_c[n])
            out = not kept[n] or _outside(config, c=c, product=product, geometric=geometric)
            cap = config.corrections.sequence_tis_cap
            weight = min(c, config.corrections.tis_cap) if cap is None else min(product, cap)
            if config.algorithm != "sft" and not out:
                advantage = teacher[n] - logp[n].item() if config.algorithm == "distill" else advantages[n]
                rho = [(logp[i] - sampling[i]) for i in places]
                total -= weights[n] * _gain(
                    config, logp[n], advantage, rho=rho, place=n - places[0], c=c, weight=weight, proximal=proximal[n]
                )
            if config.kl.in_loss and not out:
                total += config.kl.coef * weights[n] * weight * _kl(config, logp[n], reference[n])
            total -= config.entropy_coef * weights[n] * entropy[n]
            if tokens.sft_weights_N is not None:
                total -= config.sft_coef * tokens.sft_weights_N[n].item() * logp[n]
    return total


def _outside(config: LossConfig, *, c: float, product: float, geometric: float) -> bool:
    found = config.corrections
    pairs = ((c, found.mis), (product, found.sequence_mis), (geometric, found.sequence_mask))
    return any(value < low or value > high for value, (low, high) in pairs)


def _gain(
    config: LossConfig,
    logp: Tensor,
    advantage: float,
    *,
    rho: Sequence[Tensor],
    place: int,
    c: float,
    weight: float,
    proximal: float,
) -> Tensor:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    match config.algorithm:
        case "cispo":
            return min(max(rho[place].exp().item(), low), high) * advantage * logp
        case "sapo":
            tau = config.sapo_taus[0] if advantage > 0 else config.sapo_taus[1]
            return 4 / tau / (1 + (-tau * (rho[place].exp() - 1)).exp()) * advantage
        case "gspo":
            ratio, factor = (sum(rho) / len(rho)).exp(), 1.0  # type: ignore[union-attr]
        case "decoupled_ppo":
            ratio, factor = (logp - proximal).exp(), weight
        case _:
            ratio, factor = rho[place].exp(), weight / c
    return factor * torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def _kl(config: LossConfig, logp: Tensor, reference: float) -> Tensor:
    x = logp - reference
    match config.kl.estimator:
        case "k1":
            return (logp - logp.item()).exp() * x
        case "k2":
            return x * x / 2
        case _:
            return (-x).exp() - 1 + x


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: "+".join(terms) or "plain")
def test_the_loss_is_its_formula(
    algorithm: Algorithm, terms: dict[str, Any], make_tokens: Callable[..., TokenBatch]
) -> None:
    corrects = any(key.startswith(("tis", "mis", "sequence")) for key in terms)
    caps = "tis_cap" in terms or "sequence_tis_cap" in terms
    if (algorithm == "sft" and (corrects or "sft_coef" in terms)) or (algorithm in OWN_RATIO_BOUND and caps):
        pytest.skip("refused by name")
    needed: dict[str, dict[str, Any]] = {"distill": {"teacher": "x"}, "gspo": {"clip_low": 0.1, "clip_high": 0.1}}
    trainer = TrainerConfig(algorithm=algorithm, **needed.get(algorithm, {}), **terms)
    config = LossConfig.resolve(trainer, context_tokens=16)
    for seed in range(4):
        tokens = _tokens(make_tokens, seed, config)
        leaves = [tokens.policy_logprobs_N, tokens.entropy_N]
        got, wanted = policy_loss(tokens, config=config), _plain(tokens, config)
        assert got.item() == pytest.approx(wanted.item(), abs=1e-12)
        for ours, plain in zip(_grads(got, leaves), _grads(wanted, leaves), strict=True):
            assert (ours - plain).abs().max().item() <= 1e-12


def _grads(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(loss, leaves, materialize_grads=True)
