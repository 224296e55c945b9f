"""Frozen models beside the policy: the reference of a KL penalty, the teacher of a distillation.

They score the policy's tokens: ids must mean the same to both, so the policy's vocabulary must be part of theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import ModelSourceError, SetupError
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.memory import ForwardBudget
from wingbeat.trainer.models import load_model
from wingbeat.trainer.row_forwards import RowForwards
from wingbeat.trainer.sharding import ALONE, Sharding
from wingbeat.trainer.shared_base import SharedBases

_SHOWN = 3


def load_frozen(
    source: str | Path,
    *,
    role: str,
    policy: Path,
    vocabulary: int,
    config: TrainerConfig,
    device: torch.device,
    dtype: torch.dtype,
    budget: ForwardBudget | None = None,
    bases: SharedBases | None = None,
    sharding: Sharding = ALONE,
) -> RowForwards:
    """The model ``source``, to score tokens of the policy in folder ``policy``, which has ``vocabulary`` logits.

    ``role`` is its key in the configuration, for messages; ``bases`` holds it once for several users.  Raises
    SetupError where its vocabulary does not hold the policy's, ModelSourceError where there is no such model.
    """
    try:
        loaded = (load_model if bases is None else bases.load)(source, dtype=dtype, device=device)
    except ModelSourceError as error:
        raise ModelSourceError(f"trainer.{role}: {error}") from error
    if loaded.folder != policy:
        check_vocabulary(loaded.folder, policy=policy, role=role)
    model: Any = loaded.model
    model.requires_grad_(False)
    logprobs = LogprobModel(model, chunk_tokens=config.logprob_chunk_tokens, vocabulary=vocabulary)
    return RowForwards(logprobs, config=config, device=device, budget=budget, sharding=sharding)


def check_vocabulary(folder: Path, *, policy: Path, role: str) -> None:
    """Raises SetupError unless every token of the policy has the same id in the model of ``folder``."""
    theirs, ours = (Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab() for path in (folder, policy))
    others = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if others:
        named = ", ".join(map(repr, others[:_SHOWN]))
        raise SetupError(
            f"trainer.{role}: expected a model with the policy's vocabulary, got {folder}, in which {len(others)} of "
            f"{len(ours)} tokens have another id or none ({named}): name a model of the same family"
        )
