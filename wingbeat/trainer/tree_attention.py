"""How a model attends over a tree: our side of transformers' attention interface.

transformers looks an implementation up by name and calls it with every keyword that was given to
``decoder(...)``.  Ours arrives as ``tree``, which attends over the plan of this forward.  No mask is registered
for the name, so transformers builds none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from wingbeat.core.errors import SetupError
from wingbeat.trainer.tree_blocks import Block, segment_blocks, visible, whole_block
from wingbeat.trainer.tree_kernels import CpuKernel, Kernel, PlainKernel, TreeAttention
from wingbeat.trainer.tree_plan import TreePlan

IMPLEMENTATION = "wingbeat_tree"
MASK_MAX_TOKENS = 8192
"""A mask grows with the square of this; beyond, ``auto`` takes segments whatever they cost."""
_CALL_WORK = 300_000
"""Pairs of query and key, times the query's width, whose attention takes as long as one more block, both directions
on a CPU: 5,000 pairs in a model of width 64, 300 in one of 1,024."""


class Attend(Protocol):
    """What a forward pass over a tree needs in place of attention."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scaling: float, extra: dict[str, Any]
    ) -> Tensor:
        """[1, T, H, D] from [1, H, T, D]; ``extra`` holds every other keyword the model passed."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Attend | None = None,
    scaling: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Called by the model, once per layer; gpt-oss's sinks come as ``s_aux``, Gemma 2's soft cap as ``softcap``.

    Raises SetupError where the model did not pass ``tree`` on, or brings a mask: as none was built for it, that is a
    bias of its own, which would be lost.
    """
    if tree is None:
        raise SetupError(f"{type(module).__name__} does not pass keywords on to its attention")
    if attention_mask is not None:
        raise SetupError(f"{type(module).__name__} has a mask or bias of its own")
    layer: Any = module.layer_idx
    scale = 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling
    return tree(query, key, value, layer=layer, scaling=scale, extra=extra), None


AttentionInterface.register(IMPLEMENTATION, attention)


@contextmanager
def tree_attention(decoder: nn.Module) -> Iterator[None]:
    """Let ``decoder`` attend through :func:`attention`; keep it so until the backward pass is done too, because
    gradient checkpointing runs layers again there."""
    configs = {id(config): config for module in decoder.modules() if (config := _config_of(module)) is not None}
    before = [(config, config._attn_implementation) for config in configs.values()]  # pyright: ignore[reportPrivateUsage]
    try:
        for config, _ in before:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _config_of(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if isinstance(config, PreTrainedConfig) else None


class BlockAttention:
    """Attends over one plan block by block, in every layer and again in every recomputation.

    The plan's first ``path`` tokens have keys and values only: the queries are those of the tokens behind them.
    """

    def __init__(
        self, plan: TreePlan, *, backend: Literal["auto", "mask", "nodes"], device: torch.device, path: int = 0
    ) -> None:
        self._plan = plan
        self._backend: Literal["auto", "mask", "nodes"] = backend
        self._device = device
        self._path = path
        self._blocks: dict[int | None, list[Block]] = {}
        self._masks: dict[tuple[int | None, type[Kernel], torch.dtype], list[Tensor | None]] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scaling: float, extra: dict[str, Any]
    ) -> Tensor:
        softcap, sinks = extra.get("softcap"), extra.get("s_aux")
        fast = query.device.type == "cpu" and softcap is None and key.shape[3] == value.shape[3]
        kernel: Kernel = CpuKernel(scaling) if fast else PlainKernel(scaling, softcap)
        blocks, masks = self._prepared(extra.get("sliding_window"), kernel=kernel, like=query)
        output: Any = TreeAttention.apply(query, key, value, sinks, kernel, blocks, masks)
        return output.transpose(1, 2)

    def _prepared(self, window: int | None, *, kernel: Kernel, like: Tensor) -> tuple[list[Block], list[Tensor | None]]:
        """Blocks and their masks, made for the first layer of a kind and shared by the others."""
        if window is not None and window >= self._plan.longest_path:
            window = None
        if window not in self._blocks:
            width = like.shape[1] * like.shape[3]
            found = choose_blocks(self._plan, window=window, backend=self._backend, width=width)
            self._blocks[window] = [_behind(self._path, block) for block in found if block.q_stop > self._path]
        blocks = self._blocks[window]
        key = (window, type(kernel), like.dtype)
        if key not in self._masks:
            self._masks[key] = [self._mask(block, window=window, kernel=kernel, dtype=like.dtype) for block in blocks]
        return blocks, self._masks[key]

    def _mask(self, block: Block, *, window: int | None, kernel: Kernel, dtype: torch.dtype) -> Tensor | None:
        if block.kind != "masked":
            return None
        queries = slice(block.q_start + self._path, block.q_stop + self._path)
        seen_QS = visible(self._plan, queries, block.keys, window=window)
        return kernel.mask(torch.from_numpy(seen_QS).to(self._device), dtype=dtype)


def _behind(path: int, block: Block) -> Block:
    """A block with the queries behind the path only, counted from there."""
    kind = "full" if block.kind == "causal" and block.q_start < path else block.kind
    return replace(block, q_start=max(block.q_start - path, 0), q_stop=block.q_stop - path, kind=kind)


def choose_blocks(
    plan: TreePlan, *, window: int | None, backend: Literal["auto", "mask", "nodes"], width: int
) -> list[Block]:
    """One masked block, or one per segment; ``auto`` takes what looks cheaper where all heads' queries together
    have ``width`` channels.

    Only a tree of many short segments is cheaper as one block, and the sooner the smaller the model.
    """
    if backend == "mask":
        return whole_block(plan)
    blocks = segment_blocks(plan, window=window)
    if backend == "nodes" or plan.num_tokens > MASK_MAX_TOKENS:
        return blocks
    whole = whole_block(plan)
    return min(blocks, whole, key=lambda found: sum(block.area * width + _CALL_WORK for block in found))
