"""What is measured of trained tokens.  Letters: ``N`` trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wingbeat.trainer.corrections import capped, masks
from wingbeat.trainer.kl import kl_estimate
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.losses import clipped_ratio, token_advantages
from wingbeat.trainer.token_batch import TokenBatch, log_ratio


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Sums and maxima over tokens, so that micro-batches add up exactly."""

    tokens: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    capped: float = 0.0
    masked: float = 0.0
    on_policy_tokens: float = 0.0
    on_policy_mismatch_kl: float = 0.0
    max_ratio: float = 0.0
    max_on_policy_diff: float = 0.0
    kl: float | None = None
    """To the reference; None: there is none.  So with all that follow."""
    teacher_kl: float | None = None
    m2_tokens: float | None = None
    m2: float | None = None
    masked_mis: float | None = None
    masked_sequence_mis: float | None = None
    masked_sequence_mask: float | None = None
    masked_m2: float | None = None

    def __add__(self, other: TokenStats) -> TokenStats:
        def joined(name: str) -> float | None:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                return theirs if mine is None else mine
            return max(mine, theirs) if name.startswith("max_") else mine + theirs

        return TokenStats(**{item.name: joined(item.name) for item in fields(self)})  # type: ignore[arg-type]

    def metrics(self) -> dict[str, float]:
        """Metric values; a mean over no tokens is left out rather than invented."""
        found: dict[str, float] = {}
        if self.tokens:
            found |= {
                "entropy": self.entropy / self.tokens,
                "mismatch_kl": self.mismatch_kl / self.tokens,
                "clip_ratio/low": self.clipped_low / self.tokens,
                "clip_ratio/high": self.clipped_high / self.tokens,
                "correction/capped": self.capped / self.tokens,
                "correction/masked": self.masked / self.tokens,
                "ratio/max": self.max_ratio,
            }
            optional = {
                "kl": self.kl,
                "kl/teacher": self.teacher_kl,
                "correction/mis": self.masked_mis,
                "correction/sequence_mis": self.masked_sequence_mis,
                "correction/sequence_mask": self.masked_sequence_mask,
                "correction/m2": self.masked_m2,
            }
            found |= {name: value / self.tokens for name, value in optional.items() if value is not None}
        if self.m2 is not None:
            found["m2"] = self.m2 / self.m2_tokens if self.m2_tokens else 0.0
        if self.on_policy_tokens:
            found |= {
                "mismatch_kl/on_policy": self.on_policy_mismatch_kl / self.on_policy_tokens,
                "max_abs_logprob_diff": self.max_on_policy_diff,
            }
        return found


@torch.no_grad()
def token_stats(tokens: TokenBatch, *, config: LossConfig) -> TokenStats:
    """Measure a micro-batch.

    ``mismatch_kl`` is the k3 estimate of KL(sampling || policy), ``rho - 1 - log rho``, from tokens drawn
    by the sampler: Schulman (2020), "Approximating KL divergence"; also eq. 4 of arXiv 2402.03300.
    ``clip_ratio/low`` and ``/high`` count the tokens whose gradient the clip removes; cispo: whose weight it
    cuts.  ``correction/capped`` counts those whose weight a cap cuts, ``correction/masked`` those that any mask
    takes out, ``correction/NAME`` those that one does.  ``kl`` is k3 towards the reference, ``kl/teacher`` towards
    the teacher; ``m2`` is m2po's second moment of its candidates before the mask.
    """
    if not tokens.policy_logprobs_N.numel():
        return TokenStats()
    log_ratio_N = log_ratio(tokens.policy_logprobs_N, tokens.sampling_logprobs_N)
    ratio_N = log_ratio_N.exp()
    kl_N = torch.expm1(log_ratio_N) - log_ratio_N
    advantages_N, on_policy_N = token_advantages(tokens, config=config), tokens.on_policy_N
    clipped_N, either = clipped_ratio(tokens, config=config), config.algorithm == "cispo"
    diff_N = (tokens.policy_logprobs_N - tokens.sampling_logprobs_N).abs()
    masks_N = masks(tokens, config=config)
    values = {
        "entropy": tokens.entropy_N.sum(),
        "mismatch_kl": kl_N.sum(),
        "clipped_low": ((clipped_N < 1.0 - config.clip_low) & ((advantages_N < 0) | either)).sum(),
        "clipped_high": ((clipped_N > 1.0 + config.clip_high) & ((advantages_N > 0) | either)).sum(),
        "capped": capped(tokens, config=config).sum(),
        "masked": torch.stack([torch.zeros_like(on_policy_N), *masks_N.values()]).any(0).sum(),
        "on_policy_tokens": on_policy_N.sum(),
        "on_policy_mismatch_kl": torch.where(on_policy_N, kl_N, 0.0).sum(),
        "max_ratio": ratio_N.max(),
        "max_on_policy_diff": torch.where(on_policy_N, diff_N, 0.0).max(),
    }
    values |= {f"masked_{name}": mask_N.sum() for name, mask_N in masks_N.items()}
    values |= _distances(tokens)
    if config.algorithm == "m2po":
        candidates_N = log_ratio_N * advantages_N > 0
        values |= {
            "m2_tokens": candidates_N.sum(),
            "m2": torch.where(candidates_N, log_ratio_N.square(), 0.0).sum(),
        }
    # One transfer from the device for all.
    numbers = torch.stack([value.to(ratio_N.dtype) for value in values.values()]).tolist()
    return TokenStats(tokens=float(ratio_N.numel()), **dict(zip(values, numbers, strict=True)))


def _distances(tokens: TokenBatch) -> dict[str, Tensor]:
    others = {"kl": tokens.scores.reference_N, "teacher_kl": tokens.scores.teacher_N}
    return {
        name: kl_estimate(tokens.policy_logprobs_N, other_N, estimator="k3").sum()
        for name, other_N in others.items()
        if other_N is not None
    }
