"""Swapping weights in place: everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wingbeat.core.errors import ModelSourceError

SHOWN = 5


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; tied tensors stand under each of their names."""
    return dict(model.state_dict(keep_vars=True))


@torch.no_grad()
def apply_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, partial: bool = False) -> None:
    """Copy ``tensors`` into ``model`` by name, all or nothing: they must pass :func:`check_weights`."""
    for target, tensor in check_weights(model, tensors, partial=partial):
        target.copy_(tensor)


def check_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], *, partial: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """The model's tensors with what they would become.

    Each distinct tensor must come under at least one of its (tied) names, unless ``partial``.  Floating
    dtypes are converted.  Raises ModelSourceError on missing, unexpected, mis-shaped or contradictory tensors.
    """
    targets = model_tensors(model)
    unexpected = [name for name in tensors if name not in targets]
    if unexpected:
        raise ModelSourceError(_listing("weights have names the model lacks", unexpected))
    if not partial:
        given = {id(targets[name]) for name in tensors}
        missing = [name for name, target in targets.items() if id(target) not in given]
        if missing:
            raise ModelSourceError(_listing("weights lack tensors of the model", missing))
    chosen: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        target = targets[name]
        if tensor.shape != target.shape or tensor.is_floating_point() != target.is_floating_point():
            raise ModelSourceError(
                f"{name}: expected {tuple(target.shape)} {target.dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
            )
        other = chosen.setdefault(id(target), (name, tensor))
        if other[1] is not tensor and not torch.equal(other[1], tensor):
            raise ModelSourceError(f"{other[0]} and {name} are tied in the model but differ in the weights; send one")
    return [(targets[name], tensor) for name, tensor in chosen.values()]


def _listing(what: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what}: {', '.join(sorted(names)[:SHOWN])}{more}; nothing was changed"
