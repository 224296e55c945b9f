"""Rollout correction: what becomes of tokens that the policy would now draw with another probability.

The *correction ratio* ``c`` of a token lies between the sampler and the policy whose move the algorithm bounds::

    decoupled_ppo   proximal / sampling: staleness and numerics; PPO's own ratio policy / proximal comes on top
    all others      policy / sampling = rho: one ratio for both, which is also the one that is clipped

Two kinds of correction, all without a gradient of their own.  *Truncation* caps the weight of a gradient::

    tis_cap = C            min(c, C)           per token: Yao et al. (2025), "Your efficient RL framework secretly
                                               brings you off-policy RL training"
    sequence_tis_cap = C   min(prod c, C)      for every token of a turn, its importance as a whole; without bias
                                               where C is not reached, but its spread grows with the turn's length

*Masking* takes the gradient away.  Bounds are of

    mis_*                  c                   per token; IcePop masks so (Ling team 2025, arXiv 2510.18855)
    sequence_mis_*         prod c              of the turn
    sequence_mask_*        exp(mean log c)     of the turn: the geometric mean, which does not grow with the length

A masked token stays in every denominator, which must be known before the first forward.

Letters: ``N`` trained tokens; a turn's are those of one model call, and no forward holds a part of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.trainer.loss_config import ANY, Bounds, LossConfig
from wingbeat.trainer.token_batch import MAX_LOG_RATIO, TokenBatch, log_ratio


@torch.no_grad()
def correction_log_ratio(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] log c."""
    decoupled = config.algorithm == "decoupled_ppo"
    above_N = tokens.proximal_N if decoupled else tokens.policy_logprobs_N.detach()
    return log_ratio(above_N, tokens.sampling_logprobs_N)


@torch.no_grad()
def correction_weight(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] what each gradient ``A grad log pi`` is to weigh, before the algorithm's own clip."""
    log_ratio_N = correction_log_ratio(tokens, config=config)
    cap = config.corrections.sequence_tis_cap
    if cap is not None:
        return _product(log_ratio_N, tokens).clamp(max=cap)
    return log_ratio_N.exp().clamp(max=config.corrections.tis_cap)


@torch.no_grad()
def masks(tokens: TokenBatch, *, config: LossConfig) -> dict[str, Tensor]:
    """[N] each: the tokens that are taken out, by the name of what takes them; only of what is switched on."""
    log_ratio_N = correction_log_ratio(tokens, config=config)
    corrections, found = config.corrections, dict[str, Tensor]()
    if corrections.mis != ANY:
        found["mis"] = _outside(log_ratio_N.exp(), corrections.mis)
    if corrections.sequence_mis != ANY:
        found["sequence_mis"] = _outside(_product(log_ratio_N, tokens), corrections.sequence_mis)
    if corrections.sequence_mask != ANY:
        means_N = tokens.by_turn(log_ratio_N, reduce="mean")
        found["sequence_mask"] = _outside(means_N.exp(), corrections.sequence_mask)
    if tokens.scores.kept_N is not None:
        found["m2"] = ~tokens.scores.kept_N
    return found


@torch.no_grad()
def masked(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] whether any mask takes the token out."""
    out_N = torch.zeros_like(tokens.on_policy_N)
    for mask_N in masks(tokens, config=config).values():
        out_N = out_N | mask_N
    return out_N


@torch.no_grad()
def capped(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] whether a cap cuts the token's weight."""
    log_ratio_N = correction_log_ratio(tokens, config=config)
    cap = config.corrections.sequence_tis_cap
    if cap is not None:
        return _product(log_ratio_N, tokens) > cap
    return log_ratio_N.exp() > config.corrections.tis_cap


def _product(log_ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    return tokens.by_turn(log_ratio_N, reduce="sum").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _outside(ratio_N: Tensor, bounds: Bounds) -> Tensor:
    return (ratio_N < bounds[0]) | (ratio_N > bounds[1])
