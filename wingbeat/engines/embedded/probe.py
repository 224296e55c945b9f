"""Learning a model's attention layers by watching one token pass through it.

Nothing is guessed from config fields: the shapes, windows and keywords are those that the model really
hands to its attention interface, so a feature we cannot honour is refused by name at construction.
"""

from __future__ import annotations

import sys
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
TESTED = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BitNetForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Architectures whose logprobs are those of transformers' own forward pass.  Others may serve as well: what decides is
what they hand to their attention."""


class Passing:
    """An :class:`AttentionStep` of a forward whose result does not matter: every token attends to itself only."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.given[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def attend(self, layer: int, query_1HTD: Tensor, *, scaling: float | None, extra: dict[str, Any]) -> Tensor:
        value_1KTD = self.given[layer][1]
        return value_1KTD.repeat_interleave(query_1HTD.shape[1] // value_1KTD.shape[1], dim=1).transpose(1, 2)


class _Probe(Passing):
    """Records what each layer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[int, LayerSpec] = {}

    def attend(self, layer: int, query_1HTD: Tensor, *, scaling: float | None, extra: dict[str, Any]) -> Tensor:
        unknown = sorted(k for k, v in extra.items() if k not in HONOURED and v is not None and v is not False)
        if unknown:
            raise ModelSourceError(f"attention uses {', '.join(unknown)}, which cannot be honoured")
        if extra.get("is_causal") is False:
            raise ModelSourceError("attention is bidirectional, and only causal models can be sampled")
        if layer not in self.given or layer in self.layers:
            raise ModelSourceError(f"attention layer {layer} shares another layer's KV")
        key, value = self.given[layer]
        self.layers[layer] = LayerSpec(
            key.shape[1], key.shape[3], value.shape[3], extra.get("sliding_window"), key.dtype
        )
        return super().attend(layer, query_1HTD, scaling=scaling, extra=extra)


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, *, device: torch.device) -> list[LayerSpec]:
    """Switch ``model`` to our attention and return its layers in order.

    Raises ModelSourceError where the model keeps state we do not manage or uses unknown attention features.
    """
    types = set(getattr(model.config, "layer_types", None) or ()) - LAYER_TYPES
    if types:
        raise _unsupported(model, f"it has layers of type {', '.join(sorted(types))}")
    if not model._can_set_attn_implementation():  # pyright: ignore[reportPrivateUsage]
        raise _unsupported(model, "it does not use transformers' attention interface")
    model.set_attn_implementation(IMPLEMENTATION)
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    try:
        model(input_ids=token, position_ids=token, past_key_values=probe, kv_step=probe, use_cache=True)
    except ModelSourceError as error:
        raise _unsupported(model, error.message) from error
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, KeyError, RuntimeError, ValueError) as error:
        # It wants more of its cache, tells attention less, or (split) its shapes do not meet.
        raise _unsupported(model, f"its forward pass cannot be driven: {error}") from error
    layers = [probe.layers[i] for i in sorted(probe.layers)]
    if not layers or sorted(probe.layers) != list(range(model.config.num_hidden_layers)):
        raise _unsupported(
            model, f"expected attention in {model.config.num_hidden_layers} layers, found {sorted(probe.layers)}"
        )
    if window := _untold_window(model, layers):
        raise _unsupported(model, f"it masks a sliding window of {window} tokens without telling its attention")
    return layers


def _untold_window(model: PreTrainedModel, layers: list[LayerSpec]) -> int:
    """The window that the model's masks have and its attention layers do not know of, which would see everything."""
    config: Any = model.config.get_text_config()
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    masks = hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    if not window or not masks or any(layer.window for layer in layers):
        return 0
    slides = types is None or "sliding_attention" in types
    return window if slides and window < (getattr(config, "max_position_embeddings", None) or sys.maxsize) else 0


def _unsupported(model: PreTrainedModel, why: str) -> ModelSourceError:
    return ModelSourceError(
        f"the embedded engine cannot serve {type(model).__name__}: {why}; use vllm, or one of the architectures that"
        f" were tested: {', '.join(TESTED)}"
    )
