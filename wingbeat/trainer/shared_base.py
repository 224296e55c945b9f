"""Frozen models that several policies of a process use, each in memory once.

A LoRA policy trains its adapter and never its base model; references and teachers are frozen altogether.  So each
user gets a module tree of its own over the *same* parameters: adapters, hooks, flags (gradient checkpointing, the
attention in use) and replaced heads belong to a tree, and nothing that one policy does to its tree can reach another's.
A tree is a few thousand Python objects; the parameters, which are what is large, are shared::

    SharedBases ──▶ parameters of "models/base" (frozen)
                      ▲           ▲           ▲
    policy a ── tree ─┘  policy b ┘  teacher ─┘

PEFT can hold several named adapters in one tree instead; then every forward depends on which one was switched on last.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from wingbeat.trainer.models import LoadedModel, load_model, resolve_model


class SharedBases:
    """Loads each (model, device, dtype) once."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Path, torch.device, torch.dtype], LoadedModel] = {}

    def load(self, source: str | Path, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """The model of ``source``, frozen, as a module tree of the caller's own; its parameters must not be changed.

        Buffers are the caller's own, too: some models write to theirs.  Raises as ``load_model`` does.
        """
        folder = resolve_model(source)
        key = (folder, device, dtype)
        if key not in self._loaded:
            first = load_model(folder, dtype=dtype, device=device)
            first.model.requires_grad_(False)
            self._loaded[key] = first
        model = _tree(self._loaded[key].model)
        return LoadedModel(model=model, config=model.config, folder=folder)


def _tree(model: Any) -> Any:
    """A copy of everything but the parameters; those that are tied stay so."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
