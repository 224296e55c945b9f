"""Learning a model's attention layers by watching one token pass through it.

Nothing is guessed from config fields: the shapes, windows and keywords are those that the model really
hands to its attention interface, so a feature we cannot honour is refused by name at construction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.core.errors import ModelSourceError
from wingbeat.engines.embedded.attention import IMPLEMENTATION
from wingbeat.engines.embedded.kv import LayerSpec

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
HONOURED = frozenset({"sliding_window", "position_ids", "use_cache", "cache_position", "is_causal", "dropout"})
"""Keywords that either are implemented or say what already holds here."""


class _Probe:
    """An :class:`AttentionStep` that records what each layer asks for; one token attends to itself only."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[Tensor, Tensor]] = {}
        self.layers: dict[int, LayerSpec] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def attend(self, layer: int, query_1HTD: Tensor, *, scaling: float | None, extra: dict[str, Any]) -> Tensor:
        unknown = sorted(k for k, v in extra.items() if k not in HONOURED and v is not None and v is not False)
        if unknown:
            raise ModelSourceError(
                f"the model's attention uses {', '.join(unknown)}, which the embedded engine cannot honour; use vllm"
            )
        if extra.get("is_causal") is False:
            raise ModelSourceError("the model's attention is bidirectional; only causal models can be sampled")
        if layer not in self.shapes or layer in self.layers:
            raise ModelSourceError(
                f"attention layer {layer} shares another layer's KV, which is not supported; use vllm"
            )
        key, value = self.shapes[layer]
        heads = query_1HTD.shape[1]
        self.layers[layer] = LayerSpec(
            key.shape[1], key.shape[3], value.shape[3], extra.get("sliding_window"), key.dtype
        )
        return value.repeat_interleave(heads // value.shape[1], dim=1).transpose(1, 2)


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, *, device: torch.device) -> list[LayerSpec]:
    """Switch ``model`` to our attention and return its layers in order.

    Raises ModelSourceError where the model keeps state we do not manage or uses unknown attention features.
    """
    name = type(model).__name__
    types = set(getattr(model.config, "layer_types", None) or ()) - LAYER_TYPES
    if types:
        raise ModelSourceError(f"{name} has layers of type {', '.join(sorted(types))}; expected {sorted(LAYER_TYPES)}")
    if not model._can_set_attn_implementation():  # pyright: ignore[reportPrivateUsage]
        raise ModelSourceError(f"{name} does not use transformers' attention interface; use vllm")
    model.set_attn_implementation(IMPLEMENTATION)
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    model(input_ids=token, position_ids=token, past_key_values=probe, kv_step=probe, use_cache=True)
    layers = [probe.layers[i] for i in sorted(probe.layers)]
    if not layers or sorted(probe.layers) != list(range(model.config.num_hidden_layers)):
        raise ModelSourceError(
            f"{name}: expected attention in {model.config.num_hidden_layers} layers, found {sorted(probe.layers)}"
        )
    return layers
