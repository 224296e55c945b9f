"""Our side of transformers' attention interface.

transformers looks an implementation up by name and calls it with the new tokens' projected tensors and
every keyword the caller gave ``model(...)``.  Ours arrives as ``kv_step``, the same object the model gets as
``past_key_values``: the model first calls its ``update`` with new keys and values, then this function.
No mask is registered for the name, so transformers builds none.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "wingbeat_embedded"


class AttentionStep(Protocol):
    """What a forward pass needs from its KV: the write and the read."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...

    def attend(self, layer: int, query_1HTD: Tensor, *, scaling: float | None, extra: dict[str, Any]) -> Tensor:
        """[1, T, H, D].  ``extra`` holds every other keyword the model passed."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_step: AttentionStep,
    scaling: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attend from the packed new tokens over the rows that ``kv_step`` planned."""
    layer: Any = module.layer_idx
    return kv_step.attend(layer, query, scaling=scaling, extra=extra), None


AttentionInterface.register(IMPLEMENTATION, attention)
