"""The KV tensors of all layers, and one step's view of them as transformers' cache and attention see it.

Letters: H query heads, K key/value heads, G = H / K, D head size, P pool tokens, T packed tokens of a step,
N rows of a call, Q queries per row, L keys per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_POOL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps per token, and how it looks back."""

    kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    """Sliding window in positions, the query's own included; None sees everything before it."""
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


class KVStore:
    """Keys and values [K, P, D] per layer, addressed by pool token.  Grows by doubling, layer by layer.

    Memory follows the highest address in use, and growing needs one layer's tensor twice, not the pool.
    Fresh memory is zeroed: masked attention still multiplies what it masks by zero, and NaN would survive that.
    """

    def __init__(self, layers: Sequence[LayerSpec], *, capacity_tokens: int, device: torch.device) -> None:
        self.layers = tuple(layers)
        self._capacity = capacity_tokens
        self._device = device
        self._size = 0
        self.keys: list[Tensor] = [self._fresh(s.kv_heads, 0, s.key_size, s.dtype) for s in layers]
        self.values: list[Tensor] = [self._fresh(s.kv_heads, 0, s.value_size, s.dtype) for s in layers]

    def ensure(self, end: int) -> None:
        """Make addresses below ``end`` usable."""
        if end <= self._size:
            return
        size = max(self._size, min(FIRST_POOL_TOKENS, self._capacity))
        while size < end:
            size *= 2
        size = min(size, self._capacity)
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                grown = self._fresh(old.shape[0], size, old.shape[2], old.dtype)
                grown[:, : self._size] = old
                tensors[i] = grown
        self._size = size

    def copy(self, source: int, target: int, *, tokens: int) -> None:
        """Copy KV of so many tokens between addresses; the ranges must not overlap."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[:, target : target + tokens] = tensor[:, source : source + tokens]

    def ranges(self, start: int, *, tokens: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [K, tokens, D] from an address on, layer by layer, where they lie; None: all there is."""
        end = None if tokens is None else start + tokens
        for keys, values in zip(self.keys, self.values, strict=True):
            yield keys[:, start:end], values[:, start:end]

    def clear(self, start: int, *, tokens: int) -> None:
        """Zero a range that may hold non-finite numbers."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[:, start : start + tokens] = 0

    def clear_all(self) -> None:
        """Zero everything."""
        self.clear(0, tokens=self._size)

    def _fresh(self, heads: int, tokens: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(heads, tokens, size, dtype=dtype, device=self._device)
