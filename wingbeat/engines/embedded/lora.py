"""Turning a published LoRA adapter into full weights, so that one strict path updates every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from wingbeat.core.errors import ModelSourceError
from wingbeat.core.weight_protocol import AdapterInfo
from wingbeat.engines.embedded.weights import model_tensors

PREFIX = "base_model.model."
SUFFIX_A = ".lora_A.weight"
SUFFIX_B = ".lora_B.weight"


class AdapterMerger:
    """Keeps the base weights of the adapted linear layers and merges adapters onto them.

    Base weights are copied from ``model`` at the first merge, so construct the merger while the model
    still holds its base weights.  Every later adapter must cover the same modules: a module left out
    would silently keep the previous adapter.  Hu et al. 2021, "LoRA", eq. 3: W = W0 + alpha/r * B A.
    """

    def __init__(self, model: nn.Module, *, adapter: AdapterInfo) -> None:
        if adapter.rank < 1:
            raise ModelSourceError(f"adapter rank must be at least 1, got {adapter.rank}")
        self._model = model
        self._adapter = adapter
        self._base: dict[str, Tensor] = {}
        uses = Counter(id(tensor) for tensor in model_tensors(model).values())
        self._tied = frozenset(tensor for tensor, count in uses.items() if count > 1)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted modules (empty before the first merge)."""
        return tuple(self._base)

    @torch.no_grad()
    def merge(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full ``<module>.weight`` tensors from PEFT-named ``lora_A`` [r, in] and ``lora_B`` [out, r].

        Pass the result to ``update_weights(..., partial=True)``.  Computed in float32, returned in the
        base weight's dtype.  Raises ModelSourceError on other tensors, incomplete pairs or wrong shapes.
        """
        pairs = adapter_pairs(self._model, tensors, adapter=self._adapter)
        self._refuse_tied(pairs)
        if not self._base:
            self._base = {name: linear_weight(self._model, name).detach().clone() for name in pairs}
        if set(pairs) != set(self._base):
            missing, extra = sorted(set(self._base) - set(pairs)), sorted(set(pairs) - set(self._base))
            raise ModelSourceError(
                f"adapter must cover the modules of the first one: missing {missing}, unexpected {extra}; "
                "construct a new AdapterMerger on base weights to change the targets"
            )
        scale = self._adapter.alpha / self._adapter.rank
        merged: dict[str, Tensor] = {}
        for name, (a, b) in pairs.items():
            base = self._base[name]
            delta = b.to(base.device, torch.float32) @ a.to(base.device, torch.float32)
            merged[f"{name}.weight"] = torch.add(base.float(), delta, alpha=scale).to(base.dtype)
        return merged

    def _refuse_tied(self, names: Iterable[str]) -> None:
        for name in names:
            if id(linear_weight(self._model, name)) in self._tied:
                raise ModelSourceError(
                    f"adapter targets {name!r}, whose weight is tied; merging would change both users"
                )


def adapter_pairs(
    model: nn.Module, tensors: Mapping[str, Tensor], *, adapter: AdapterInfo
) -> dict[str, tuple[Tensor, Tensor]]:
    """``lora_A`` [r, in] and ``lora_B`` [out, r] by the name of their module in ``model``.

    Raises ModelSourceError on other tensors, incomplete pairs, wrong shapes, or modules that are no linear layers.
    """
    found_a, found_b = _by_suffix(tensors, SUFFIX_A), _by_suffix(tensors, SUFFIX_B)
    if len(found_a) + len(found_b) != len(tensors) or not found_a:
        known = {f"{PREFIX}{n}{s}" for f, s in ((found_a, SUFFIX_A), (found_b, SUFFIX_B)) for n in f}
        raise ModelSourceError(
            f"expected only {PREFIX}<module>{SUFFIX_A} and {SUFFIX_B} tensors, got "
            f"{sorted(set(tensors) - known)[:5]}; plain LoRA on linear layers is what can be served"
        )
    if set(found_a) != set(found_b):
        raise ModelSourceError(f"lora_A and lora_B must come in pairs, unpaired: {sorted(set(found_a) ^ set(found_b))}")
    for name, a in found_a.items():
        weight = linear_weight(model, name)
        expected = ((adapter.rank, weight.shape[1]), (weight.shape[0], adapter.rank))
        got = (tuple(a.shape), tuple(found_b[name].shape))
        if got != expected:
            raise ModelSourceError(f"{name}: expected lora_A and lora_B of shapes {expected}, got {got}")
    return {name: (a, found_b[name]) for name, a in found_a.items()}


def linear_weight(model: nn.Module, name: str) -> Tensor:
    """The weight of a linear layer that an adapter targets.  Raises ModelSourceError where there is none."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ModelSourceError(f"adapter targets {name!r}, which the model lacks; is the base model right?") from None
    if not isinstance(module, nn.Linear):
        raise ModelSourceError(f"adapter targets {name!r}, a {type(module).__name__}; only nn.Linear can be adapted")
    return module.weight


def _by_suffix(tensors: Mapping[str, Tensor], suffix: str) -> dict[str, Tensor]:
    return {
        name[len(PREFIX) : -len(suffix)]: tensor
        for name, tensor in tensors.items()
        if name.startswith(PREFIX) and name.endswith(suffix)
    }
