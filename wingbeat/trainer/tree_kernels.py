"""Attention over blocks of a tree, with exact gradients.

Softmax over the union of several key stretches is the mean of the stretches' own softmaxes, weighted by
their sums of exponentials: each block gives its output and its log-sum-exp, and those are merged as they
come (Milakov and Gimelshein 2018, arXiv 1805.02867).  Backwards, a block needs only the final output and
log-sum-exp, because ``exp(score - lse)`` is the final probability (as in Ring Attention, Liu et al. 2023,
arXiv 2310.01889), so nothing of a block is kept.

Letters: ``H`` query heads, ``K`` key heads, ``T`` tokens, ``Q`` and ``S`` queries and keys of a block,
``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wingbeat.trainer.tree_blocks import Block

_QUERIES_AT_ONCE = 1024
_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Kernel(Protocol):
    """Attention of one block.

    ``causal`` is aligned at the top left; ``mask_QS`` is None, or what :meth:`mask` made of a block's visibility.
    """

    def mask(self, seen_QS: Tensor, *, dtype: torch.dtype) -> Tensor: ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask_QS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output [1, H, Q, D] and log-sum-exp [1, H, Q] of the block alone."""
        ...

    def backward(
        self, grad: Tensor, saved: Saved, *, causal: bool, mask_QS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's share of the gradients of query, key and value."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """A block's inputs, and the final outputs and log-sum-exps of its queries over all their blocks."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """Torch's flash attention for CPUs, any float dtype, as many key heads as divide the query heads."""

    scale: float

    def mask(self, seen_QS: Tensor, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(seen_QS.shape, dtype=dtype, device=seen_QS.device).masked_fill_(~seen_QS, -math.inf)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask_QS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _FORWARD(query, key, value, 0.0, causal, attn_mask=mask_QS, scale=self.scale)

    def backward(
        self, grad: Tensor, saved: Saved, *, causal: bool, mask_QS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (grad, saved.query, saved.key, saved.value, saved.output, saved.lse, 0.0, causal)
        return _BACKWARD(*inputs, attn_mask=mask_QS, scale=self.scale)


@dataclass(frozen=True, slots=True)
class PlainKernel:
    """Matrix products, for any device, head sizes that differ between key and value, and soft-capped scores."""

    scale: float
    softcap: float | None = None

    def mask(self, seen_QS: Tensor, *, dtype: torch.dtype) -> Tensor:
        return seen_QS

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask_QS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, query.shape[2], _QUERIES_AT_ONCE):
            rows = slice(start, start + _QUERIES_AT_ONCE)
            some = query[:, :, rows]
            scores, _ = self._scores(some, key, seen=_seen(mask_QS, causal, start, some, key))
            lse = scores.logsumexp(-1)
            weights = (scores - lse[..., None]).exp()
            parts.append(((weights @ _grouped(value, weights)).flatten(1, 2), lse.flatten(1, 2)))
        return torch.cat([output for output, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def backward(
        self, grad: Tensor, saved: Saved, *, causal: bool, mask_QS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        key, value = saved.key, saved.value
        grad_query: list[Tensor] = []
        grad_key = torch.zeros_like(key, dtype=saved.lse.dtype)
        grad_value = torch.zeros_like(value, dtype=saved.lse.dtype)
        for start in range(0, saved.query.shape[2], _QUERIES_AT_ONCE):
            rows = slice(start, start + _QUERIES_AT_ONCE)
            query = saved.query[:, :, rows]
            scores, slope = self._scores(query, key, seen=_seen(mask_QS, causal, start, query, key))
            heads = scores.shape[:3]
            weights = (scores - saved.lse[:, :, rows].unflatten(1, heads[1:])[..., None]).exp()
            grad_rows = grad[:, :, rows].to(weights.dtype).unflatten(1, heads[1:])
            output = saved.output[:, :, rows].to(weights.dtype).unflatten(1, heads[1:])
            delta = (grad_rows * output).sum(-1, keepdim=True)
            grad_scores = weights * (grad_rows @ _grouped(value, weights).mT - delta) * self.scale
            if slope is not None:
                grad_scores = grad_scores * slope
            grad_query.append((grad_scores @ _grouped(key, weights)).flatten(1, 2))
            queries = query.to(weights.dtype).unflatten(1, heads[1:])
            grad_key += (grad_scores.mT @ queries).sum(2)
            grad_value += (weights.mT @ grad_rows).sum(2)
        return torch.cat(grad_query, 2), grad_key, grad_value

    def _scores(self, query: Tensor, key: Tensor, *, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[1, K, H / K, Q, S] at least float32, -inf where unseen, and the soft cap's slope."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(dtype).unflatten(1, (key.shape[1], -1))
        scores = grouped @ key.to(dtype)[:, :, None].mT * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, 1 - bent * bent
        return scores if seen is None else scores.masked_fill(~seen, -math.inf), slope


class TreeAttention(torch.autograd.Function):
    """``apply(query, key, value, sinks, kernel, blocks, masks)`` gives [1, H, T, D].

    ``sinks`` is None or one logit per query head that takes weight and gives no value (gpt-oss);
    ``masks`` has one entry per block, None where its kind says all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernel: Kernel,
        blocks: Sequence[Block],
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, tokens, _ = query.shape
        output = query.new_zeros((batch, tokens, heads, value.shape[3]), dtype=dtype).transpose(1, 2)
        lse = query.new_full((batch, tokens, heads), -math.inf, dtype=dtype).transpose(1, 2)
        for block, mask_QS in zip(blocks, masks, strict=True):
            part, part_lse = kernel.forward(
                query[:, :, block.queries],
                key[:, :, block.keys],
                value[:, :, block.keys],
                causal=block.kind == "causal",
                mask_QS=mask_QS,
            )
            rows = (output[:, :, block.queries], lse[:, :, block.queries])
            if block.first:
                rows[0].copy_(part)
                rows[1].copy_(part_lse)
            else:
                _merge(*rows, part, part_lse)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(dtype)[None, :, None])
            output.mul_((lse - total).exp()[..., None])
            lse = total
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.kernel, ctx.blocks, ctx.masks = kernel, blocks, masks
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, output, lse = ctx.saved_tensors
        grads = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        for block, mask_QS in zip(ctx.blocks, ctx.masks, strict=True):
            q, k = block.queries, block.keys
            saved = Saved(query[:, :, q], key[:, :, k], value[:, :, k], output[:, :, q], lse[:, :, q])
            parts = ctx.kernel.backward(grad[:, :, q], saved, causal=block.kind == "causal", mask_QS=mask_QS)
            for total, places, part in zip(grads, (q, k, k), parts, strict=True):
                total[:, :, places] += part
        grad_sinks = None
        if sinks is not None:
            delta = (grad.to(lse.dtype) * output).sum(-1)
            share = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
            grad_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        grad_query, grad_key, grad_value = (total.to(query.dtype) for total in grads)
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None


def _merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a block's result into what its queries have so far, in place."""
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp_()[..., None]).addcmul_(part.to(output.dtype), (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def _seen(mask_QS: Tensor | None, causal: bool, start: int, query: Tensor, key: Tensor) -> Tensor | None:
    """The visibility of those of a block's queries that begin at ``start``."""
    if mask_QS is not None:
        return mask_QS[start : start + query.shape[2]]
    if not causal:
        return None
    places_S = torch.arange(key.shape[2], device=key.device)
    places_Q = torch.arange(start, start + query.shape[2], device=key.device)
    return places_S <= places_Q[:, None]


def _grouped(keys: Tensor, like: Tensor) -> Tensor:
    """[1, K, 1, S, D] beside [1, K, H / K, Q, S]."""
    return keys.to(like.dtype)[:, :, None]
