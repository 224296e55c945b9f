"""One optimiser update's forwards and backwards: rows, trees and paths, one summed gradient.

Every loss is a weighted sum over tokens whose weights were fixed before the first forward, so how the rows
are put into forwards changes memory and speed but never a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.trainer.batching import TokenFacts
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.loss_stats import TokenStats, token_stats
from wingbeat.trainer.losses import policy_loss
from wingbeat.trainer.memory import ForwardBudget
from wingbeat.trainer.row_forwards import Forward, RowForwards
from wingbeat.trainer.rows import Row
from wingbeat.trainer.second_moment import second_moment_kept
from wingbeat.trainer.sharding import ALONE, Sharding
from wingbeat.trainer.token_batch import TokenBatch
from wingbeat.trainer.tree_plan import Ints
from wingbeat.trainer.updates import Update


@dataclass(frozen=True, slots=True)
class PassResult:
    """Sums over forwards."""

    loss: float = 0.0
    stats: TokenStats = field(default_factory=TokenStats)
    row_tokens: int = 0
    """Tokens of the rows."""
    forward_tokens: int = 0
    """Tokens that were forwarded for them, without padding."""
    padded_tokens: int = 0
    """The same with padding."""

    def __add__(self, other: PassResult) -> PassResult:
        return PassResult(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})


class GradientPass:
    """Adds up the gradient of an update, sharing forwards as the config says (:class:`RowForwards`)."""

    def __init__(
        self,
        logprobs: LogprobModel,
        *,
        config: TrainerConfig,
        loss_config: LossConfig,
        device: torch.device,
        budget: ForwardBudget | None = None,
        sharding: Sharding = ALONE,
    ) -> None:
        self._loss_config = loss_config
        self._device = device
        self.forwards = RowForwards(logprobs, config=config, device=device, budget=budget, sharding=sharding)

    @property
    def supports_trees(self) -> bool:
        return self.forwards.supports_trees

    def run(self, update: Update, *, measure: bool = False) -> PassResult:
        """Add the update's gradient to those of the parameters; with ``measure``, only look.

        Raises DoesNotFit where memory runs out; then begin again, from clean gradients.

        Rows that have no gradient are not forwarded: their advantages are zero, and neither a KL term nor an
        entropy bonus, teacher or cross-entropy trains them.  Where all rows are so, all are forwarded without
        gradient, to be measured.
        """
        active = [row for row in update.rows if self._trains(row, update=update)]
        total = PassResult()
        rows = active or update.rows
        update = self._with_mask(rows, update=update)
        gradient, sharding = bool(active) and not measure, self.forwards.sharding
        with torch.set_grad_enabled(gradient), sharding.running(gradient=gradient):
            own = sharding.own(rows, shares=self.forwards.shares)
            for forward in sharding.matched(self.forwards.plan(own)):
                total += self._walked(forward, update) if forward.depth_first else self._scored(forward, update)
        return sharding.summed(total)

    def _trains(self, row: Row, *, update: Update) -> bool:
        credit, config = update.credit, self._loss_config
        if config.trains_every_token or (credit.sft_weights and credit.sft_weights[row.episode]):
            return True
        return config.algorithm != "sft" and credit.trains(row)

    def _with_mask(self, rows: Sequence[Row], *, update: Update) -> Update:
        """With m2po's mask over these rows, which takes a pass of its own: it needs all log-ratios at once."""
        if self._loss_config.algorithm != "m2po":
            return update
        logprobs = self.forwards.score(rows)
        masks_N = second_moment_kept(
            [logprobs[row.index].astype(np.float64) - row.sampling_logprobs_N for row in rows],
            [update.credit.of_row(row) for row in rows],
            threshold=self._loss_config.m2_threshold,
        )
        kept: list[NDArray[Any]] = [np.zeros(0, np.bool_)] * (1 + max((row.index for row in rows), default=-1))
        for row, mask_N in zip(rows, masks_N, strict=True):
            kept[row.index] = mask_N
        return replace(update, scores=replace(update.scores, kept_N=kept))

    def _scored(self, forward: Forward, update: Update) -> PassResult:
        with self.forwards.scored(forward) as scored:
            facts = self._facts(forward, update)
            tokens = facts.scored(*scored, on_policy_version=update.on_policy_version)
            loss = policy_loss(tokens, config=self._loss_config)
            if torch.is_grad_enabled():
                loss.backward()
            return self._result(forward, tokens, loss=loss)

    def _walked(self, forward: Forward, update: Update) -> PassResult:
        facts = self._facts(forward, update)

        def loss_of(places_N: Ints, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
            some = facts.take(torch.from_numpy(places_N).to(self._device))
            tokens = some.scored(logprobs_N, entropy_N, on_policy_version=update.on_policy_version)
            return policy_loss(tokens, config=self._loss_config)

        result = self.forwards.walk(forward, loss_of=loss_of)
        tokens = facts.scored(result.logprobs_N, result.entropy_N, on_policy_version=update.on_policy_version)
        return self._result(forward, tokens, loss=result.loss)

    def _facts(self, forward: Forward, update: Update) -> TokenFacts:
        return TokenFacts.of(forward.rows, credit=update.credit, scores=update.scores, device=self._device)

    def _result(self, forward: Forward, tokens: TokenBatch, *, loss: Tensor) -> PassResult:
        return PassResult(
            float(loss.detach()),
            token_stats(tokens, config=self._loss_config),
            row_tokens=forward.row_tokens,
            forward_tokens=forward.forward_tokens,
            padded_tokens=forward.padded_tokens,
        )
