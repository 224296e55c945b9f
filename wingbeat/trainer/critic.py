"""The critic of PPO: a model that says, at every trained token, what reward is still to come.

It is the policy's own architecture and starting weights (adapters of the same settings where the policy has
any), with one scalar head instead of the language model's, and an AdamW of its own.  The head starts at zero,
so that the first advantages are plain returns.

Values are fitted to the returns that the advantages were computed with, by half the squared error (Schulman et
al. 2017, arXiv 1707.06347, section 5).  As in PPO's reference implementation, a value gains nothing by moving
further than ``value_clip`` from where it was at the step's start::

    loss = mean over trained tokens of 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)

The mean is over the whole batch, whose token count is known before the first forward, and forwards are shared
as the policy's are (:mod:`wingbeat.trainer.row_forwards`), so packing changes no gradient.  Memory is that of one
forward's activations: no logits are ever made.

Letters: ``N`` trained tokens, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wingbeat.core.config import PolicyConfig
from wingbeat.core.config.trainer import CriticConfig
from wingbeat.trainer.assignment import Assigned, Floats
from wingbeat.trainer.logprobs import LogprobModel, Targets
from wingbeat.trainer.memory import ForwardBudget
from wingbeat.trainer.optimizer import PolicyOptimizer
from wingbeat.trainer.row_forwards import Forward, RowForwards
from wingbeat.trainer.rows import Row
from wingbeat.trainer.shared_base import SharedBases
from wingbeat.trainer.skips import SkipRule
from wingbeat.trainer.trainable import load_trainable

CRITIC = "critic."
"""What the names of its tensors begin with in a checkpoint."""
_HEAD = "value_head."


class ValueModel(LogprobModel):
    """Scores tokens with the value of what stands before them, instead of their logprob."""

    def __init__(self, base: Any) -> None:
        super().__init__(base, chunk_tokens=1)
        width = base.get_output_embeddings().weight.shape[1]
        # The language model's head was needed for the proof that the decoder is what feeds it; now it is memory.
        base.set_output_embeddings(nn.Identity())
        weight: Tensor = base.get_input_embeddings().weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.head = nn.Linear(width, 1, device=weight.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def score(self, hidden_NH: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Values [N], at least float32, and zeros in place of entropies."""
        values_N = self.head(hidden_NH.to(self.head.weight.dtype))[:, 0]
        return values_N, torch.zeros_like(values_N)


@dataclass(frozen=True, slots=True)
class Fitting:
    """What values are to become, [N] per row by ``Row.index``."""

    returns_N: Sequence[Floats]
    values_N: Sequence[Floats]
    """As they were at the step's start."""
    num_tokens: int
    """Of the whole batch."""


class Critic:
    """Values tokens, and learns from returns.  The policy's ``config`` says how, its ``trainer.critic`` how fast."""

    def __init__(
        self,
        source: Path,
        *,
        config: PolicyConfig,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        budget: ForwardBudget | None = None,
        bases: SharedBases | None = None,
    ) -> None:
        """``budget`` is the policy's: what does not fit for one does not for the other; so are ``bases``."""
        self._config = config.trainer.critic or CriticConfig()
        self._device = device
        base = load_trainable(source, config=config, seed=seed, device=device, dtype=dtype, bases=bases).base
        self._model = ValueModel(base)
        self._forwards = RowForwards(self._model, config=config.trainer, device=device, budget=budget)
        decoder = self._model.decoder
        trained = {name: tensor for name, tensor in decoder.named_parameters() if tensor.requires_grad}
        trained |= {_HEAD + name: tensor for name, tensor in self._model.head.named_parameters()}
        self._optimizer = PolicyOptimizer(trained, config=config.trainer)

    @property
    def warmup_steps(self) -> int:
        """First steps, in which the policy waits for the critic."""
        return self._config.warmup_steps

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """[N] per row, by its index: the value at each trained token."""
        found = self._forwards.score(rows)
        return [found[row.index].astype(np.float64) if row.num_trained else np.zeros(0) for row in rows]

    def fit(
        self, rows: Sequence[Row], assigned: Assigned, *, values_N: Sequence[Floats], skips: SkipRule
    ) -> dict[str, float]:
        """Move the values towards the returns, by ``updates_per_batch`` updates over all rows; gives metrics.

        ``values_N`` are those at the step's start.  ``critic/explained_variance`` is theirs: 1 - Var(R - V) / Var(R),
        left out where all returns are equal.  Raises NonFiniteGradient where ``skips`` allows no update more to be
        skipped.
        """
        trained = [row for row in rows if row.num_trained]
        fitting = Fitting(assigned.returns_N, values_N, num_tokens=sum(row.num_trained for row in trained))
        if not trained:
            return {}
        losses: list[float] = []
        norms: list[float] = []
        for _ in range(self._config.updates_per_batch):
            self._optimizer.zero_grad()
            loss = self._forwards.budget.until_it_fits(
                lambda: sum(self._backward(forward, fitting) for forward in self._forwards.plan(trained)),
                clean=self._optimizer.zero_grad,
            )
            losses.append(loss)
            norm = skips.unless_not_finite(lambda: self._optimizer.step(self._config.learning_rate))
            norms += [] if norm is None else [norm]
        metrics = {"critic/value_loss": losses[0]} | _value_metrics(assigned.returns_N, values_N)
        return metrics | ({"critic/grad_norm": sum(norms) / len(norms)} if norms else {})

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights and moments, for an exact-resume checkpoint."""
        return {CRITIC + name: tensor for name, tensor in self._optimizer.state_tensors().items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_tensors` gave, from a mapping that may hold other tensors.

        Raises SetupError, changing nothing, where they are of another critic.
        """
        self._optimizer.load_state_tensors(_own(tensors))

    def _backward(self, forward: Forward, fitting: Fitting) -> float:
        """Add the gradient of some rows; their share of the loss."""
        returns_N, old_N = (self._joined(values, forward.rows) for values in (fitting.returns_N, fitting.values_N))

        def loss_of(places: NDArray[np.int64], values_N: Tensor, _entropy: Tensor) -> Tensor:
            index = torch.from_numpy(places).to(self._device)
            clip = inf if self._config.value_clip == "unlimited" else self._config.value_clip
            return value_loss(values_N, returns_N[index], old_N[index], clip=clip).sum() / fitting.num_tokens

        if forward.depth_first:
            return float(self._forwards.walk(forward, loss_of=loss_of).loss)
        with self._forwards.scored(forward) as (values_N, entropy_N):
            loss = loss_of(np.arange(len(values_N)), values_N, entropy_N)
            loss.backward()
        return float(loss.detach())

    def _joined(self, values_N: Sequence[Floats], rows: Sequence[Row]) -> Tensor:
        joined = torch.from_numpy(np.concatenate([values_N[row.index] for row in rows]))
        return joined.to(self._model.head.weight.dtype).to(self._device)


def value_loss(values_N: Tensor, returns_N: Tensor, old_N: Tensor, *, clip: float) -> Tensor:
    """[N] half the squared error of each value, or of the value clipped around the old one where that is larger."""
    clipped_N = old_N + (values_N - old_N).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square())


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(CRITIC): tensor for name, tensor in tensors.items() if name.startswith(CRITIC)}


def _value_metrics(returns_N: Sequence[Floats], values_N: Sequence[Floats]) -> dict[str, float]:
    returns, values = np.concatenate(returns_N), np.concatenate(values_N)
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    if spread := float(returns.var()):
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
    return metrics
