"""Drawing tokens.

Letters: B requests sampled this step, V vocabulary, C blocks of the vocabulary, S tokens per block.

Tokens are drawn by inverting the cumulative distribution at one uniform number per request, first among
blocks of the vocabulary, then within one (Devroye 1986, "Non-Uniform Random Variate Generation", III.2).
That costs one pass over the logits, whose sums are also the normaliser of the logprobs; Gumbel noise would
cost a random number per vocabulary entry.  A seeded request's noise is its own, whatever it is batched with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_TOKENS = 256
"""Short enough for float32 sums within a block, long enough for few blocks."""
MAX_FLAT_TOKENS = 2048
"""Vocabularies up to this size are one block: fewer, if larger, operations."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one request's next token is drawn; temperature 0 is greedy and ignores truncation."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    generator: torch.Generator | None = None
    """The request's own noise (seeded requests); None: the engine's."""


def sample(logits_BV: Tensor, draws: Sequence[Draw], *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their logprobs [B] (float32) under the distribution they were drawn from.

    Greedy rows give the logprob of the untempered distribution.  A row with non-finite logits yields a
    non-finite logprob, which the caller must treat as a failure.
    """
    scores_BV = logits_BV.float()
    temperatures = [d.temperature or 1.0 for d in draws]
    if any(t != 1.0 for t in temperatures):
        scores_BV = scores_BV / torch.tensor(temperatures, device=scores_BV.device).unsqueeze(1)
    cut = [i for i, d in enumerate(draws) if d.temperature and (d.top_k or d.top_p < 1.0)]
    if cut:
        scores_BV = scores_BV.clone()
        scores_BV[cut] = _truncate(scores_BV[cut], [draws[i] for i in cut])
    top_B1 = scores_BV.amax(1, keepdim=True)
    weights_BV = (scores_BV - top_B1).exp_()
    tokens_B, totals_B = _invert(weights_BV, _uniforms(draws, generator, like=weights_BV))
    greedy = [i for i, d in enumerate(draws) if not d.temperature]
    if greedy:
        tokens_B[greedy] = scores_BV[greedy].argmax(1)
    chosen_B = scores_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
    return tokens_B, chosen_B - top_B1.squeeze(1) - totals_B.log().float()


def _uniforms(draws: Sequence[Draw], generator: torch.Generator, *, like: Tensor) -> Tensor:
    """[B] in [0, 1), double where the device has it (Apple's does not)."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    uniforms_B = torch.rand(len(draws), generator=generator, dtype=dtype, device=like.device)
    for i, draw in enumerate(draws):
        if draw.generator is not None:
            uniforms_B[i] = torch.rand((), generator=draw.generator, dtype=dtype, device=like.device)
    return uniforms_B


def _invert(weights_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [B] at which the running sum of weights passes the uniforms, and the sums [B] of all weights.

    A token of weight zero adds nothing to the running sum, so it is never the one that passes.
    """
    batch, vocabulary = weights_BV.shape
    if vocabulary <= MAX_FLAT_TOKENS:
        running_BV = weights_BV.to(uniforms_B.dtype).cumsum(1)
        totals_B = running_BV[:, -1]
        return _passed(running_BV, uniforms_B * totals_B), totals_B
    blocks_BCS = F.pad(weights_BV, (0, -vocabulary % BLOCK_TOKENS)).view(batch, -1, BLOCK_TOKENS)
    sums_BC = blocks_BCS.sum(2).to(uniforms_B.dtype)
    running_BC = sums_BC.cumsum(1)
    totals_B = running_BC[:, -1]
    targets_B = uniforms_B * totals_B
    block_B1 = _passed(running_BC, targets_B).unsqueeze(1)
    before_B = (running_BC.gather(1, block_B1) - sums_BC.gather(1, block_B1)).squeeze(1)
    inside_BS = blocks_BCS.gather(1, block_B1.unsqueeze(2).expand(batch, 1, BLOCK_TOKENS)).squeeze(1)
    token_B = _passed(inside_BS.to(uniforms_B.dtype).cumsum(1), (targets_B - before_B).clamp_min_(0))
    return block_B1.squeeze(1) * BLOCK_TOKENS + token_B, totals_B


def _passed(running_BN: Tensor, targets_B: Tensor) -> Tensor:
    """The first entry [B] of a running sum that exceeds the target, or the first that reaches its end where
    rounding has put the target there.  NaN gives entry 0."""
    passed_B = (running_BN <= targets_B.unsqueeze(1)).sum(1)
    return torch.minimum(passed_B, (running_BN < running_BN[:, -1:]).sum(1))


def _truncate(scores_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """-inf outside the top-k and then the nucleus of what is left (Holtzman et al. 2020, section 3.1)."""
    vocabulary = scores_BV.shape[1]
    device = scores_BV.device
    limits_B1 = torch.tensor([[d.top_k or vocabulary] for d in draws], device=device)
    mass_B1 = torch.tensor([[d.top_p] for d in draws], device=device)
    sorted_BV, order_BV = scores_BV.sort(dim=1, descending=True, stable=True)
    sorted_BV = sorted_BV.masked_fill(torch.arange(vocabulary, device=device) >= limits_B1, -torch.inf)
    probs_BV = sorted_BV.softmax(1)
    before_BV = probs_BV.cumsum(1) - probs_BV
    before_BV[:, 0] = 0.0
    outside_BV = (before_BV >= mass_B1) & (mass_B1 < 1.0)
    return torch.empty_like(scores_BV).scatter_(1, order_BV, sorted_BV.masked_fill(outside_BV, -torch.inf))
