"""One forward pass over a packed mix of decoding and prefilling rows.

Letters: H query heads, K key/value heads, G = H / K, D head size, T packed tokens, N rows of a call (holes
included), Q queries per row, L keys per row, W keys visible through a window.

Tokens are packed in the order in which the attention calls need them, so a call's queries are a slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wingbeat.engines.embedded.kv import KVStore
from wingbeat.engines.embedded.pool import Extent
from wingbeat.engines.embedded.runs import Run, plan_runs

CPU_CALL_OVERHEAD = 256
"""Fixed cost of an attention call in tokens of KV read; measured at about 20 microseconds."""
DEVICE_CALL_OVERHEAD = 16384
"""The same on accelerators, where memory is far faster and a launch is not."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens at positions ``[begin, begin + count)`` of the sequence whose KV lies in ``extent``."""

    extent: Extent
    begin: int
    count: int

    @property
    def end(self) -> int:
        return self.begin + self.count


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call: ``span`` extents of ``size`` tokens from address ``start``, ``length`` keys of each."""

    start: int
    size: int
    run: Run
    tokens: slice
    """Its tokens within the packed step."""
    gather_NQ: Tensor | None
    """Packed token of each query; holes and padding point at a token of the call.  None: the slice itself."""
    take: Tensor | None
    """Which of the N * Q outputs are real, in packed order.  None: all."""
    segments: tuple[Segment, ...]
    masks: dict[int | None, tuple[int, Tensor | None, bool]] = field(default_factory=dict)
    """Per window: first visible key, additive mask [N, 1, Q, W] and whether plain causal attention does."""


def packing_order(segments: Sequence[Segment]) -> list[int]:
    """Indices into ``segments`` in the order in which :func:`plan_calls` wants them."""
    if len(segments) == 1:
        return [0]
    keys = [(s.count > 1, s.extent.size, s.extent.start) for s in segments]
    return sorted(range(len(segments)), key=keys.__getitem__)


def plan_calls(segments: Sequence[Segment], *, device: torch.device) -> list[Call]:
    """The attention calls over segments in packing order."""
    overhead = CPU_CALL_OVERHEAD if device.type == "cpu" else DEVICE_CALL_OVERHEAD
    calls: list[Call] = []
    offset = 0
    for _, group in itertools.groupby(segments, key=lambda s: (s.count > 1, s.extent.size)):
        rows = list(group)
        runs = plan_runs(
            [s.extent.unit for s in rows],
            [s.end for s in rows],
            queries=[s.count for s in rows],
            overhead=overhead,
        )
        for run in runs:
            call = _call(rows[run.first : run.last + 1], run, offset=offset, device=device)
            calls.append(call)
            offset = call.tokens.stop
    return calls


def _call(rows: Sequence[Segment], run: Run, *, offset: int, device: torch.device) -> Call:
    size, first = rows[0].extent.size, rows[0].extent.unit
    total = sum(s.count for s in rows)
    gather = take = None
    if total != run.span * run.queries:
        table = [offset] * (run.span * run.queries)
        real: list[int] = []
        token = offset
        for s in rows:
            at = (s.extent.unit - first) * run.queries
            table[at : at + s.count] = range(token, token + s.count)
            real.extend(range(at, at + s.count))
            token += s.count
        gather = torch.tensor(table, device=device).view(run.span, run.queries)
        take = torch.tensor(real, device=device)
    tokens = slice(offset, offset + total)
    return Call(rows[0].extent.start, size, run, tokens, gather, take, tuple(rows))


class ForwardStep:
    """A step's KV as the model sees it: ``past_key_values`` and ``kv_step`` in one."""

    def __init__(self, store: KVStore, calls: Sequence[Call], *, positions_T: Tensor, addresses_T: Tensor) -> None:
        self._store = store
        self._calls = calls
        self._positions_T = positions_T
        self._addresses_T = addresses_T

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nothing may derive them from here; part of transformers' cache face."""
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values [1, K, T, D] to their addresses."""
        self._store.keys[layer_idx].index_copy_(1, self._addresses_T, key_states[0])
        self._store.values[layer_idx].index_copy_(1, self._addresses_T, value_states[0])
        return key_states, value_states

    def attend(self, layer: int, query_1HTD: Tensor, *, scaling: float | None, extra: dict[str, Any]) -> Tensor:
        """Attention output [1, T, H, D] of all calls."""
        query_THD = query_1HTD[0].transpose(0, 1)
        if len(self._calls) == 1:
            return self._attend_call(self._calls[0], layer, query_THD, scaling).unsqueeze(0)
        tokens, heads = query_THD.shape[:2]
        out_THD = query_THD.new_empty(tokens, heads, self._store.layers[layer].value_size)
        for call in self._calls:
            out_THD[call.tokens] = self._attend_call(call, layer, query_THD, scaling)
        return out_THD.unsqueeze(0)

    def _attend_call(self, call: Call, layer: int, query_THD: Tensor, scaling: float | None) -> Tensor:
        spec, span, queries = self._store.layers[layer], call.run.span, call.run.queries
        window = spec.window
        if window not in call.masks:
            call.masks[window] = self._mask(call, window, query_THD.dtype)
        first_key, mask, causal = call.masks[window]
        keys = self._view(self._store.keys[layer], call, first_key)
        values = self._view(self._store.values[layer], call, first_key)
        query = query_THD[call.tokens] if call.gather_NQ is None else query_THD[call.gather_NQ]
        heads = query_THD.shape[1]
        groups = heads // spec.kv_heads
        if queries == 1:
            query_NKGD = query.reshape(span, spec.kv_heads, groups, -1)
            out = F.scaled_dot_product_attention(query_NKGD, keys, values, attn_mask=mask, scale=scaling)
            out = out.reshape(span, heads, -1)
        else:
            query_NHQD = query.reshape(span, queries, heads, -1).transpose(1, 2)
            out = _attend_many(query_NHQD, keys, values, mask=mask, causal=causal, scaling=scaling)
            out = out.transpose(1, 2).reshape(span * queries, heads, -1)
        return out if call.take is None else out[call.take]

    def _view(self, pool_KPD: Tensor, call: Call, first_key: int) -> Tensor:
        """The call's rows [N, K, W, D] where they lie, without a copy."""
        kv_heads, tokens, size = pool_KPD.shape
        shape = (call.run.span, kv_heads, call.run.length - first_key, size)
        strides = (call.size * size, tokens * size, size, 1)
        return pool_KPD.as_strided(shape, strides, (call.start + first_key) * size)

    def _mask(self, call: Call, window: int | None, dtype: torch.dtype) -> tuple[int, Tensor | None, bool]:
        """A query at position p sees keys in (p - window, p]; holes and padding see what their stand-in sees."""
        length, queries = call.run.length, call.run.queries
        lowest = min(s.begin for s in call.segments)
        first_key = 0 if window is None else max(0, lowest - window + 1)
        if queries == 1 and lowest == length - 1:
            return first_key, None, False
        whole = len(call.segments) == 1 and lowest == 0 and (window is None or length <= window)
        if whole:
            return 0, None, True
        positions = self._positions_T[call.tokens] if call.gather_NQ is None else self._positions_T[call.gather_NQ]
        positions_NQ1 = positions.view(call.run.span, queries, 1)
        keys_W = torch.arange(first_key, length, device=positions.device)
        hidden_NQW = keys_W > positions_NQ1
        if window is not None:
            hidden_NQW = hidden_NQW | (keys_W <= positions_NQ1 - window)
        mask_NQW = torch.zeros(hidden_NQW.shape, dtype=dtype, device=positions.device)
        return first_key, mask_NQW.masked_fill_(hidden_NQW, -torch.inf).unsqueeze(1), False


def _attend_many(
    query_NHQD: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, causal: bool, scaling: float | None
) -> Tensor:
    """Several queries per row.  Keys and values [N, K, L, D] are never repeated over the G query heads of each."""
    kv_heads = keys.shape[1]
    groups = query_NHQD.shape[1] // kv_heads
    if causal:
        return F.scaled_dot_product_attention(
            query_NHQD, keys, values, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
    by_group = [
        F.scaled_dot_product_attention(query_NHQD[:, g::groups], keys, values, attn_mask=mask, scale=scaling)
        for g in range(groups)
    ]
    return by_group[0] if groups == 1 else torch.stack(by_group, dim=2).flatten(1, 2)
