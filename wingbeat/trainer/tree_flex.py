"""A tree's attention by FlexAttention, which compiles a kernel that skips invisible blocks (CUDA only).

FlexAttention (Dong et al. 2024, arXiv 2412.05496) has no backward pass on CPUs.  Its own way to a block mask
evaluates all pairs of tokens; here the blocks follow from the intervals ``[k, tout[k])`` alone.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from wingbeat.trainer.memory import is_out_of_memory
from wingbeat.trainer.tree_plan import TreePlan

BLOCK = 128
"""Tokens a side of FlexAttention's blocks."""
_MIN_HEAD = 16
_MAX_KERNELS = 64
"""There is one each for forward alone and with gradient, with and without window, for trees of one block and of more,
and for each shape of heads and each dtype among the models of a process.  Beyond this limit, which is 8 unless it is
set, torch would go on uncompiled and hold all scores at once."""


class FlexUnusable(Exception):
    """No kernel can be made here: a compiler is missing, say, or the device has too little fast memory for one."""


@functools.cache
def _compiled() -> Any:
    """One kernel for all tree sizes: with static shapes every new size would compile again."""
    compile_: Any = torch.compile  # whose overloads leave out the limit
    return compile_(flex_attention, dynamic=True, recompile_limit=_MAX_KERNELS)


class FlexAttention:
    """Attends over one plan, in every layer and again in every recomputation.

    Uncompiled it holds all scores at once and has no backward pass, but runs anywhere.
    """

    def __init__(self, plan: TreePlan, *, device: torch.device, compiled: bool = True) -> None:
        self._plan = plan
        self._tout_T = torch.from_numpy(plan.tout_T).to(device)
        self._positions_T = torch.from_numpy(plan.positions_T).to(device)
        self._masks: dict[int | None, BlockMask] = {}
        self._compiled = compiled

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scaling: float, extra: dict[str, Any]
    ) -> Tensor:
        softcap, sinks = extra.get("softcap"), extra.get("s_aux")
        call: Any = _compiled() if self._compiled else flex_attention
        found = call(
            *(_widened(tensor) for tensor in (query, key, value)),
            score_mod=None if softcap is None else _soft_cap(softcap),
            block_mask=self._mask(extra.get("sliding_window")),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        output = (found if sinks is None else found[0])[..., : value.shape[3]]
        if sinks is not None:
            # A sink takes exp(sink) of the weight: what is left for the tokens is the logistic of lse - sink.
            share = torch.sigmoid(found[1].lse - sinks.to(found[1].lse.dtype)[None, :, None])
            output = output * share[..., None].to(output.dtype)
        return output.transpose(1, 2)

    def try_out(self, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> None:
        """Attend there and back, with copies.  Raises FlexUnusable where that cannot be compiled."""
        with torch.enable_grad():
            copies = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
            try:
                torch.autograd.grad(self(*copies, **call).sum(), copies)
            except Exception as error:  # of whatever the compiler calls: nothing narrower is common to them
                if is_out_of_memory(error):
                    raise
                raise FlexUnusable(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error

    def _mask(self, window: int | None) -> BlockMask:
        if window is not None and window >= self._plan.longest_path:
            window = None
        if window not in self._masks:
            self._masks[window] = self._block_mask(window)
        return self._masks[window]

    def _block_mask(self, window: int | None) -> BlockMask:
        tout_T, positions_T = self._tout_T, self._positions_T

        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            inside = (key <= query) & (query < tout_T[key])
            return inside if window is None else inside & (positions_T[query] - positions_T[key] < window)

        some_QK, all_QK = block_visibility(self._plan, window=window)
        partial, whole = (_listed(found, device=tout_T.device) for found in (some_QK & ~all_QK, all_QK))
        length = self._plan.num_tokens
        return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length))


def block_visibility(plan: TreePlan, *, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Which pairs of blocks may have visible pairs of tokens, and which have only such; both bool.

    The first errs on the side of True, which costs time but changes nothing, because tokens are then
    looked at one by one.
    """
    starts = np.arange(0, plan.num_tokens, BLOCK)
    stops = np.minimum(starts + BLOCK, plan.num_tokens)
    low_tout, high_tout = (reduce.reduceat(plan.tout_T, starts) for reduce in (np.minimum, np.maximum))
    low, high = (reduce.reduceat(plan.positions_T, starts) for reduce in (np.minimum, np.maximum))
    some_QK = (starts[None, :] < stops[:, None]) & (starts[:, None] < high_tout[None, :])
    all_QK = (stops[None, :] - 1 <= starts[:, None]) & (stops[:, None] <= low_tout[None, :])
    all_QK &= (stops - starts == BLOCK)[None, :] & (stops - starts == BLOCK)[:, None]
    if window is not None:
        some_QK &= low[:, None] - high[None, :] < window
        all_QK &= high[:, None] - low[None, :] < window
    return some_QK, all_QK


def _listed(found_QK: np.ndarray, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which, as FlexAttention wants them."""
    counts = torch.from_numpy(found_QK.sum(1).astype(np.int32))
    order = torch.from_numpy(np.argsort(~found_QK, axis=1, kind="stable").astype(np.int32))
    return counts[None, None].to(device), order[None, None].to(device)


def _widened(tensor: Tensor) -> Tensor:
    """Heads too small for the kernels, filled up with zeros, which change no product."""
    missing = _MIN_HEAD - tensor.shape[3]
    return tensor if missing <= 0 else torch.nn.functional.pad(tensor, (0, missing))


def _soft_cap(cap: float) -> Any:
    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped
