"""The loss: one weighted sum over tokens for every algorithm.

Letters: ``N`` trained tokens of a micro-batch; ``rho`` the ratio of policy to sampling probability;
``A`` the advantage of the token; ``sg`` stops the gradient.

::

    loss = - sum_n w_n gain_n  +  kl_coef sum_n w_n kl_n  -  entropy_coef sum_n w_n H_n  -  sft_coef sum_n v_n log pi_n

Most algorithms share one gain, PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347, eq. 7), taken against
the *sampling* logprobs::

    gain_n = min(rho_n A_n, clip(rho_n, 1 - clip_low, 1 + clip_high) A_n)

and differ in the weights ``w_n`` (:mod:`wingbeat.trainer.updates`) and in the advantages.  The weights are fixed
for the whole update before its first forward: their denominators are explicit and global, so splitting
a batch into micro-batches in any way gives the same gradient.  The others have gains of their own
(:func:`policy_loss`).  A turn's tokens are those of one model call that train; no forward ever holds a part of them.

REINFORCE and RLOO were published without ratio and clip.  Where a token is on-policy, rho is 1 and the
gradient of the surrogate is exactly theirs, ``A * grad log pi``.  Off-policy (stale samples, several
updates per batch) the papers prescribe nothing; here the ratio corrects and the clip bounds.  A
``clip_low`` of 1 and a huge ``clip_high`` leave the pure importance-weighted gradient.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from wingbeat.trainer.corrections import correction_log_ratio, correction_weight, masked
from wingbeat.trainer.kl import kl_term
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.token_batch import MAX_LOG_RATIO, TokenBatch, log_ratio


def policy_loss(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """The scalar to minimise for these tokens; sum it over micro-batches (see the module's formula).

    - cispo: ``gain = sg(clip(rho)) A log pi``: MiniMax (2025, arXiv 2506.13585), eq. 4 and 5.  The ratio is
      clipped whatever the sign of ``A``, as a weight: no token loses its gradient.
    - gspo: PPO's gain with the turn's ratio for all of its tokens, ``exp(mean log rho)``: Zheng et al. (2025,
      arXiv 2507.18071), eq. 5 to 7.  ``sequence_ratio = "product"`` is ``exp(sum log rho)``, the plain ratio of
      the turn's probabilities, whose spread grows with its length.
    - sapo: ``gain = (4 / tau) sigmoid(tau (rho - 1)) A``, tau by the sign of ``A``: Qwen team (2025, arXiv 2511.20347).
      On-policy its gradient is ``A grad log pi``; it fades with the distance, in both directions.
    - decoupled_ppo: PPO's gain with ``u = policy / proximal`` in place of rho, times ``sg(proximal / sampling)``: Fu
      et al. (2025, arXiv 2505.24298, AReaL), the decoupled objective.  What bounds the move is the policy at the
      step's start, however old the sample.
    - m2po: ``gain = rho A`` without a clip, of the tokens that :mod:`wingbeat.trainer.second_moment` keeps.
    - distill: PPO's gain with ``A = sg(log teacher - log policy)`` of the token itself, whose gradient on-policy is
      that of minus KL(policy || teacher) in each place: on-policy distillation, Agarwal et al. (2024, arXiv
      2306.13649), with the sampled token as the estimate of the sum over the vocabulary.
    - sft: no gain.

    Masked tokens (rollout correction, m2po) have neither gain nor KL term; they stay in the denominators.
    """
    kept_N = ~masked(tokens, config=config)
    total = tokens.policy_logprobs_N.new_zeros(())
    if config.algorithm != "sft":
        total = total - (tokens.weights_N * torch.where(kept_N, gain(tokens, config=config), 0.0)).sum()
    if config.kl.in_loss:
        total = total + config.kl.coef * (tokens.weights_N * torch.where(kept_N, _kl(tokens, config=config), 0.0)).sum()
    if config.entropy_coef > 0:
        total = total - config.entropy_coef * (tokens.weights_N * tokens.entropy_N).sum()
    if tokens.sft_weights_N is not None:
        total = total - config.sft_coef * (tokens.sft_weights_N * tokens.policy_logprobs_N).sum()
    return total


def gain(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] what the algorithm maximises, before weights and masks."""
    advantages_N = token_advantages(tokens, config=config)
    ratio_N = clipped_ratio(tokens, config=config)
    match config.algorithm:
        case "cispo":
            weight_N = _clip(ratio_N, config=config).detach()
            return weight_N * advantages_N * tokens.policy_logprobs_N
        case "sapo":
            positive, negative = config.sapo_taus
            tau_N = torch.full_like(ratio_N, negative).masked_fill(advantages_N > 0, positive)
            return torch.sigmoid(tau_N * (ratio_N - 1.0)) * (4.0 / tau_N) * advantages_N
        case _:
            gain_N = torch.minimum(ratio_N * advantages_N, _clip(ratio_N, config=config) * advantages_N)
            return gain_N * _factor(tokens, config=config)


def clipped_ratio(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] the ratio that the algorithm clips or gates, of each token or of its turn."""
    if config.algorithm == "decoupled_ppo":
        return log_ratio(tokens.policy_logprobs_N, tokens.proximal_N).exp()
    rho_N = log_ratio(tokens.policy_logprobs_N, tokens.sampling_logprobs_N)
    if config.algorithm != "gspo":
        return rho_N.exp()
    reduce = "mean" if config.sequence_ratio == "geometric_mean" else "sum"
    return tokens.by_turn(rho_N, reduce=reduce).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_advantages(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    """[N] the advantages, which distill finds in the teacher's opinion."""
    if config.algorithm != "distill":
        return tokens.advantages_N
    teacher_N = tokens.scores.teacher_N
    assert teacher_N is not None, "distill scores its teacher before every step"
    return log_ratio(teacher_N, tokens.policy_logprobs_N.detach())


def _clip(ratio_N: Tensor, *, config: LossConfig) -> Tensor:
    return ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)


def _factor(tokens: TokenBatch, *, config: LossConfig) -> Tensor | float:
    """[N] what turns the weight that a token's gradient has by its ratio into that of the rollout correction."""
    corrections = config.corrections
    if config.algorithm == "decoupled_ppo":
        return correction_weight(tokens, config=config)
    if corrections.tis_cap == inf and corrections.sequence_tis_cap is None:
        return 1.0
    return correction_weight(tokens, config=config) / correction_log_ratio(tokens, config=config).exp()


def _kl(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
    reference_N = tokens.scores.reference_N
    assert reference_N is not None, "a KL penalty scores its reference before every step"
    weight_N = correction_weight(tokens, config=config)
    return kl_term(tokens.policy_logprobs_N, reference_N, weight_N=weight_N, estimator=config.kl.estimator)
