"""Drawing tokens.

Letters: B requests sampled this step, R those of them whose tokens are restricted, P those whose nucleus is not
found yet, V vocabulary, W the most probable of it, C blocks of the vocabulary, S tokens per block.

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
CANDIDATES = (256, 4096)
"""How many of the most probable tokens are tried before all are sorted, which costs 40 and 10 times as much."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one request's next token is drawn; temperature 0 is greedy and ignores truncation."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    generator: torch.Generator | None = None
    """The request's own noise (seeded requests); None: the engine's."""

    @property
    def truncates(self) -> bool:
        return bool(self.temperature) and (self.top_k > 0 or self.top_p < 1.0)


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens the grammars of some rows allow."""

    rows: Sequence[int]
    allowed_GV: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens [B], their logprobs [B] (float32), and from what the restricted rows were drawn."""

    tokens_B: Tensor
    logprobs_B: Tensor
    restricted: Sequence[int]
    """Rows under top-k, top-p or a grammar, in order; greedy ones are not among them."""
    allowed_RV: Tensor | None
    """Per restricted row: which tokens could have been drawn.  None where no row is restricted."""


def sample(
    logits_BV: Tensor, draws: Sequence[Draw], *, generator: torch.Generator, masks: Masks | None = None
) -> Drawn:
    """Draw one token per row, with its logprob under the distribution that it was drawn from.

    Greedy rows take the most probable token that their grammar allows, with its logprob in the untempered
    and unrestricted distribution.  A row with non-finite logits or nothing allowed yields a non-finite logprob.
    """
    scores_BV = logits_BV.float()
    temperatures = [d.temperature or 1.0 for d in draws]
    if any(t != 1.0 for t in temperatures):
        scores_BV = scores_BV / torch.tensor(temperatures, device=scores_BV.device).unsqueeze(1)
    masked = {} if masks is None else {row: i for i, row in enumerate(masks.rows)}
    restricted = [i for i, d in enumerate(draws) if d.truncates or (d.temperature and i in masked)]
    allowed_RV = None
    if restricted:
        scores_RV = _restrict(scores_BV[restricted], restricted, draws=draws, masks=masks)
        allowed_RV = scores_RV > -torch.inf
        scores_BV = scores_BV.index_copy(0, torch.tensor(restricted, device=scores_BV.device), scores_RV)
    top_B1 = scores_BV.amax(1, keepdim=True)
    weights_BV = (scores_BV - top_B1).exp_()
    tokens_B, totals_B = _invert(weights_BV, _uniforms(draws, generator, like=weights_BV))
    greedy = [i for i, d in enumerate(draws) if not d.temperature]
    if greedy:
        tokens_B[greedy] = _apply(scores_BV[greedy], greedy, masks=masks).argmax(1)
    chosen_B = scores_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
    logprobs_B = chosen_B - top_B1.squeeze(1) - totals_B.log().float()
    return Drawn(tokens_B, logprobs_B, restricted, allowed_RV)


def _restrict(scores_RV: Tensor, rows: Sequence[int], *, draws: Sequence[Draw], masks: Masks | None) -> Tensor:
    """-inf where a row's grammar forbids, then where its truncation does.  ``scores_RV`` may be overwritten."""
    scores_RV = _apply(scores_RV, rows, masks=masks)
    cut = [r for r, i in enumerate(rows) if draws[i].truncates]
    if not cut:
        return scores_RV
    truncated = _truncate(scores_RV[cut], [draws[rows[r]] for r in cut])
    if len(cut) == len(rows):
        return truncated
    scores_RV[cut] = truncated
    return scores_RV


def _apply(scores_RV: Tensor, rows: Sequence[int], *, masks: Masks | None) -> Tensor:
    """-inf where the grammar of row ``rows[r]`` forbids.  ``scores_RV`` may be overwritten."""
    place = {} if masks is None else {row: i for i, row in enumerate(masks.rows)}
    held = [r for r, i in enumerate(rows) if i in place]
    if masks is None or not held:
        return scores_RV
    allowed_HV = masks.allowed_GV[[place[rows[r]] for r in held]]
    # 1 / allowed - 1 is 0 or infinite; subtracting that is many times faster than a masked fill.
    penalty_HV = allowed_HV.to(scores_RV.dtype).reciprocal_().sub_(1.0)
    if len(held) == len(rows):
        return scores_RV.sub_(penalty_HV)
    scores_RV[held] -= penalty_HV
    return scores_RV


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


def _truncate(scores_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """-inf outside the top-k and then the nucleus of what is left (Holtzman et al. 2020, section 3.1).

    What a row keeps depends on that row alone, so a seeded request draws the same in any company.
    """
    vocabulary = scores_RV.shape[1]
    result_RV = torch.empty_like(scores_RV)
    pending = list(range(len(draws)))
    for width in (*(w for w in CANDIDATES if 4 * w <= vocabulary), vocabulary):
        rows_PV = scores_RV[pending]
        kept_PW, order_PW, closed = _nucleus(rows_PV, [draws[r] for r in pending], width=width)
        found = torch.full_like(rows_PV, -torch.inf).scatter_(1, order_PW, kept_PW)
        if len(pending) == len(draws):
            result_RV = found
        else:
            result_RV[pending] = found
        pending = [r for r, done in zip(pending, closed, strict=True) if not done]
        if not pending:
            break
    return result_RV


def _nucleus(rows_PV: Tensor, draws: Sequence[Draw], *, width: int) -> tuple[Tensor, Tensor, list[bool]]:
    """The ``width`` best scores per row (-inf where cut), where they belong, and which rows need no more of them."""
    vocabulary, device = rows_PV.shape[1], rows_PV.device
    limits_P1 = torch.tensor([[d.top_k or vocabulary] for d in draws], device=device)
    mass_P1 = torch.tensor([[d.top_p] for d in draws], device=device)
    whole = width == vocabulary
    best_PW, order_PW = rows_PV.sort(dim=1, descending=True, stable=True) if whole else rows_PV.topk(width, dim=1)
    seen_P1 = (limits_P1 <= width) | (best_PW[:, -1:] == -torch.inf)
    best_PW = best_PW.masked_fill(torch.arange(width, device=device) >= limits_P1, -torch.inf)
    totals_P1 = best_PW.logsumexp(1, keepdim=True)
    if not whole and any(d.top_k == 0 or d.top_k > width for d in draws):
        totals_P1 = torch.where(seen_P1, totals_P1, rows_PV.logsumexp(1, keepdim=True))
    probs_PW = (best_PW - totals_P1).exp()
    running_PW = probs_PW.cumsum(1)
    before_PW = running_PW - probs_PW
    before_PW[:, 0] = 0.0
    outside_PW = (before_PW >= mass_P1) & (mass_P1 < 1.0)
    reached_P1 = (limits_P1 >= vocabulary) & (mass_P1 < 1.0) & (running_PW[:, -1:] >= mass_P1)
    closed = [True] * len(draws) if whole else (seen_P1 | reached_P1).squeeze(1).tolist()
    return best_PW.masked_fill(outside_PW, -torch.inf), order_PW, closed
