"""Loading a model so that it can be trained: all weights, or adapters beside frozen ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers.modeling_layers import GradientCheckpointingLayer

from wingbeat.core.config import LoraConfig, PolicyConfig
from wingbeat.core.errors import SetupError
from wingbeat.trainer.models import load_model
from wingbeat.trainer.shared_base import SharedBases


@dataclass(frozen=True, slots=True)
class Trainable:
    """A causal LM in evaluation mode whose trainable parameters require gradients."""

    base: Any
    """The Hugging Face model; adapters, if any, are inside of it."""
    model: Any
    """What is exported: ``base``, or its PEFT wrapper."""


def load_trainable(
    source: Path,
    *,
    config: PolicyConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    bases: SharedBases | None = None,
) -> Trainable:
    """The model of folder ``source``; with ``config.lora``, adapters that ``seed`` initialises.

    Only adapters are trained over ``bases``, which holds the frozen rest once for all its users.
    """
    load = load_model if bases is None or config.lora is None else bases.load
    base: Any = load(source, dtype=dtype, device=device).model
    base.eval()
    base.requires_grad_(config.lora is None)
    model: Any = base if config.lora is None else _add_adapters(base, lora=config.lora, seed=seed)
    if config.trainer.gradient_checkpointing:
        _checkpoint_gradients(base)
    return Trainable(base=base, model=model)


def _add_adapters(base: Any, *, lora: LoraConfig, seed: int) -> Any:
    """Wrap ``base`` with freshly initialised adapters: random A from ``seed``, zero B."""
    settings = PeftLoraConfig(
        r=lora.rank,
        # PEFT divides by the rank; integers and floats are both accepted.
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(base, settings).eval()
        except ValueError as error:
            raise SetupError(
                f"lora.targets {lora.targets!r} do not fit {type(base).__name__}: {error}; name its linear modules"
            ) from error


def _checkpoint_gradients(base: Any) -> None:
    """Recompute each layer in the backward pass.

    Transformers checkpoints only layers in training mode, so that mode is set on the layers themselves and
    on none of their sub-modules: dropout stays off.
    """
    base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SetupError(
            f"gradient_checkpointing: {type(base).__name__} has no layers that support it; switch it off in the config"
        )
    for layer in layers:
        layer.training = True
