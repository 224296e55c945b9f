"""One process's half of an engine: the model, the KV of its attention heads, and the forward pass over both.

Letters: B requests whose next token is due, T packed tokens, V vocabulary, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.engines.embedded.kv import KVStore, LayerSpec
from wingbeat.engines.embedded.probe import probe_layers
from wingbeat.engines.embedded.step import ForwardStep, Segment, plan_calls
from wingbeat.engines.embedded.weights import apply_weights

LayerKV = tuple[Tensor, Tensor]
"""Keys and values [K, T, D] of one layer."""


class Runner(Protocol):
    """What the engine asks of whatever holds model and KV, be it one process or several."""

    @property
    def parallelism(self) -> int:
        """Processes that share the model."""
        ...

    @property
    def layers(self) -> Sequence[LayerSpec]:
        """Of the whole model."""
        ...

    def forward(self, segments: Sequence[Segment], ids: Sequence[int], due: Sequence[int]) -> Tensor:
        """Feed the tokens of ``segments``, packed in this order; logits [B, V] at the packed indices ``due``.

        Called, like what follows but for the weights, in inference mode.
        """
        ...

    def write_weights(self, tensors: Mapping[str, Tensor], *, partial: bool) -> None: ...
    def read_kv(self, start: int, *, tokens: int) -> list[LayerKV]:
        """KV of all heads at an address, layer by layer, copied to the CPU."""
        ...

    def write_kv(self, start: int, kv: Sequence[LayerKV]) -> None:
        """Put KV of all heads to an address for which there is memory."""
        ...

    def ensure(self, end: int) -> None: ...
    def copy(self, source: int, target: int, *, tokens: int) -> None: ...
    def clear(self, start: int, *, tokens: int) -> None: ...
    def clear_all(self) -> None: ...


class ModelRunner:
    """The :class:`Runner` of one process.  It owns ``model``, which is on ``device`` already.

    Raises ModelSourceError where the model needs attention features that the engine cannot honour.
    """

    parallelism = 1

    def __init__(self, model: PreTrainedModel, *, capacity_tokens: int, device: torch.device) -> None:
        # cuDNN's attention, which torch prefers on Hopper, plans anew for every length of the keys: each decode step
        # has another one, and a plan takes longer than a step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.model = cast(Any, model)
        self._device = device
        self.layers: Sequence[LayerSpec] = probe_layers(model, device=device)
        with torch.inference_mode():
            self.store = KVStore(self.layers, capacity_tokens=capacity_tokens, device=device)
        self.ensure, self.copy = self.store.ensure, self.store.copy
        self.clear, self.clear_all = self.store.clear, self.store.clear_all

    def forward(self, segments: Sequence[Segment], ids: Sequence[int], due: Sequence[int]) -> Tensor:
        calls = plan_calls(segments, device=self._device)
        positions: list[int] = []
        addresses: list[int] = []
        for segment in segments:
            begin, count = segment.begin, segment.count
            address = segment.extent.start + begin
            if count == 1:
                positions.append(begin)
                addresses.append(address)
            else:
                positions.extend(range(begin, begin + count))
                addresses.extend(range(address, address + count))
        packed_3T = torch.tensor([ids, positions, addresses], device=self._device)
        step = ForwardStep(self.store, calls, positions_T=packed_3T[1], addresses_T=packed_3T[2])
        keep_B = torch.tensor(due, dtype=torch.long, device=self._device)
        output = self.model(
            input_ids=packed_3T[:1],
            position_ids=packed_3T[1:2],
            past_key_values=step,
            kv_step=step,
            use_cache=True,
            logits_to_keep=keep_B,
        )
        return output.logits[0]

    def write_weights(self, tensors: Mapping[str, Tensor], *, partial: bool) -> None:
        """Raises ModelSourceError on tensors that do not fit, and changes nothing then."""
        apply_weights(self.model, tensors, partial=partial)

    def read_kv(self, start: int, *, tokens: int) -> list[LayerKV]:
        return [(k.cpu().clone(), v.cpu().clone()) for k, v in self.store.ranges(start, tokens=tokens)]

    def write_kv(self, start: int, kv: Sequence[LayerKV]) -> None:
        for target, source in zip(self.store.ranges(start), kv, strict=True):
            for into, given in zip(target, source, strict=True):
                into[:, : given.shape[1]] = given
