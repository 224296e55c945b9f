"""KV on its way from one engine to another: what it is of, whether it fits, and its form on the wire.

    export_kv ─▶ KvExport ─▶ encode_kv ─▶ bytes (safetensors) ─▶ decode_kv ─▶ KvExport ─▶ import_kv

Always the heads of the whole model, so that engines of different parallelism exchange it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from wingbeat.core.errors import UnavailableError
from wingbeat.core.ports import KvExport
from wingbeat.engines.embedded.kv import LayerSpec
from wingbeat.engines.embedded.rows import common_prefix

FORMAT = "wingbeat-kv-1"


class _Facts(msgspec.Struct, frozen=True):
    format: str
    policy_version: int
    lineage: int
    model: str
    layers: int


def model_shape(model: nn.Module, layers: Sequence[LayerSpec]) -> str:
    """Says of what model KV is: equal where one's KV fits into the other's cache."""
    parts = [f"{s.kv_heads}x{s.key_size}+{s.value_size}:{s.window or 0}:{s.dtype}" for s in layers]
    return f"{type(model).__name__} {' '.join(parts)}"


def fits(export: KvExport, layers: Sequence[LayerSpec]) -> bool:
    """Whether the tensors are what a cache of these layers holds."""
    tokens = len(export.tokens)
    expected = [((s.kv_heads, tokens, s.key_size), (s.kv_heads, tokens, s.value_size), s.dtype) for s in layers]
    found = [(tuple(k.shape), tuple(v.shape), k.dtype) for k, v in export.layers if k.dtype == v.dtype]
    return found == expected


def usable_tokens(export: KvExport, prompt_ids: Sequence[int]) -> int:
    """How many of a prompt's first tokens the KV is of; the last is left to compute, since its logits are wanted."""
    limit = min(len(export.tokens), len(prompt_ids) - 1)
    if limit < 1 or export.tokens[0] != prompt_ids[0]:
        return 0
    return common_prefix(export.tokens, tuple(prompt_ids), limit=limit)


def encode_kv(export: KvExport) -> bytes:
    """As a safetensors file."""
    tensors: dict[str, Tensor] = {"tokens": torch.tensor(export.tokens, dtype=torch.int32)}
    for i, (keys, values) in enumerate(export.layers):
        tensors[f"keys.{i}"], tensors[f"values.{i}"] = keys.contiguous(), values.contiguous()
    facts = _Facts(FORMAT, export.policy_version, export.lineage, export.model, len(export.layers))
    return save(tensors, {"kv": msgspec.json.encode(facts).decode()})


def decode_kv(data: bytes) -> KvExport:
    """Raises UnavailableError where the bytes are no whole :func:`encode_kv`."""
    try:
        facts = msgspec.json.decode(_metadata(data)["kv"], type=_Facts)
        tensors = load(data)
        layers = tuple((tensors[f"keys.{i}"], tensors[f"values.{i}"]) for i in range(facts.layers))
        tokens = tuple(tensors["tokens"].tolist())
    except (SafetensorError, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"these {len(data)} bytes are not KV as an engine exports it: {error}") from error
    if facts.format != FORMAT or any(t.dim() != 3 or t.shape[1] != len(tokens) for pair in layers for t in pair):
        raise UnavailableError(f"expected KV of format {FORMAT} for {len(tokens)} tokens, got {facts}")
    return KvExport(tokens, layers, facts.policy_version, facts.lineage, facts.model)


def _metadata(data: bytes) -> dict[str, str]:
    """The text entries of a safetensors file: 8 bytes of length, then a JSON header."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]
