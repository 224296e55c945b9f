"""What is asked of models before a step's first gradient: of the policy as it is, of a reference, of a teacher.

Only what the configuration needs is run:

    policy      decoupled_ppo with several updates per batch, a KL penalty in the reward
    reference   any KL penalty
    teacher     distill

For LoRA the reference that is not named is the base model, its adapters switched off; for full fine-tuning it is a
second copy of the weights that the policy started from.  m2po scores for itself (:mod:`wingbeat.trainer.update`).

Letters: ``N`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wingbeat.core.config import PolicyConfig
from wingbeat.trainer.kl import kl_estimate
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.reference import load_frozen
from wingbeat.trainer.row_forwards import RowForwards
from wingbeat.trainer.rows import Row
from wingbeat.trainer.scores import PerRow, Scores
from wingbeat.trainer.shared_base import SharedBases


@dataclass(frozen=True, slots=True)
class PolicyUnderTraining:
    """The model whose tokens are scored."""

    model: Any
    """Its PEFT wrapper for LoRA."""
    forwards: RowForwards
    source: Path
    """Where its first weights lie."""
    vocabulary: int
    """Number of logits."""
    device: torch.device
    dtype: torch.dtype
    bases: SharedBases | None = None
    """Where frozen models are that other policies of this process use, too."""


class Scoring:
    """Scores batches, see the module.

    Raises SetupError or ModelSourceError where the reference or the teacher cannot be used.
    """

    def __init__(self, policy: PolicyUnderTraining, *, config: PolicyConfig, loss_config: LossConfig) -> None:
        self._policy = policy
        self._config = loss_config
        trainer = config.trainer
        self._scores_policy = loss_config.kl.in_reward or (
            loss_config.algorithm == "decoupled_ppo" and trainer.updates_per_batch > 1
        )
        self._without_adapters = loss_config.needs_reference and trainer.reference is None and config.lora is not None
        frozen: dict[str, str | Path | None] = {
            "reference": (trainer.reference or policy.source) if loss_config.needs_reference else None,
            "teacher": trainer.teacher if loss_config.needs_teacher else None,
        }
        if self._without_adapters:
            frozen["reference"] = None
        self._frozen = {
            role: load_frozen(
                source,
                role=role,
                policy=policy.source,
                vocabulary=policy.vocabulary,
                config=trainer,
                device=policy.device,
                dtype=policy.dtype,
                budget=policy.forwards.budget,
                bases=policy.bases,
                sharding=policy.forwards.sharding.replica(),
            )
            for role, source in frozen.items()
            if source is not None
        }

    def score(self, rows: Sequence[Row]) -> Scores:
        """Of all rows of a batch, in the order of their index; under the weights as they are now."""
        return Scores(
            proximal_N=self._of_policy(rows) if self._scores_policy else None,
            reference_N=self._of_policy(rows, bare=True) if self._without_adapters else self._of("reference", rows),
            teacher_N=self._of("teacher", rows),
        )

    def penalties(self, scores: Scores) -> list[NDArray[np.float64]] | None:
        """[N] per row: what a KL penalty in the reward takes off at each token; None where there is none."""
        if not self._config.kl.in_reward or scores.proximal_N is None or scores.reference_N is None:
            return None
        kl = self._config.kl
        pairs = zip(scores.proximal_N, scores.reference_N, strict=True)
        return [kl.coef * kl_estimate(*map(_float64, pair), estimator=kl.estimator).numpy() for pair in pairs]

    def _of_policy(self, rows: Sequence[Row], *, bare: bool = False) -> PerRow:
        adapters: AbstractContextManager[Any] = self._policy.model.disable_adapter() if bare else nullcontext()
        with adapters:
            return _by_index(rows, self._policy.forwards.score(rows))

    def _of(self, role: str, rows: Sequence[Row]) -> PerRow | None:
        forwards = self._frozen.get(role)
        return None if forwards is None else _by_index(rows, forwards.score(rows))


def _by_index(rows: Sequence[Row], found: Mapping[int, NDArray[Any]]) -> PerRow:
    return [found.get(row.index, np.zeros(0, np.float32)) for row in rows]


def _float64(values_N: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values_N).double()
