"""One optimiser update's forwards and backwards: rows, trees and paths, one summed gradient.

Every loss is a weighted sum over tokens whose weights were fixed before the first forward, so how the rows
are put into forwards changes memory and speed but never a gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from wingbeat.core.config.schema import TrainerConfig
from wingbeat.core.errors import SetupError
from wingbeat.trainer.batching import Credit, MicroBatch, TokenFacts, micro_batches
from wingbeat.trainer.depth_first import DepthFirst
from wingbeat.trainer.forwards import SharingRules, plan_forwards
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.losses import LossConfig, TokenBatch, TokenStats, policy_loss, token_stats
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import Ints, TreePlan
from wingbeat.trainer.tree_scorer import TreeScorer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """One optimiser update's share of a batch."""

    rows: list[Row]
    """Those with trained tokens."""
    credit: Credit
    on_policy_version: int | None
    """Tokens of this version were sampled by the weights that score them now; None: no token was."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Sums over forwards."""

    loss: float = 0.0
    stats: TokenStats = field(default_factory=TokenStats)
    row_tokens: int = 0
    """Tokens of the rows."""
    forward_tokens: int = 0
    """Tokens that were forwarded for them, without padding."""

    def __add__(self, other: PassResult) -> PassResult:
        return PassResult(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})


class GradientPass:
    """Adds up the gradient of an update, sharing forwards as the config says.

    A model that cannot be driven over a tree keeps its rows; that is logged once, here.  Where the config
    demands trees (``prefix_tree = "on"``) it is refused instead: SetupError.
    """

    def __init__(
        self, logprobs: LogprobModel, *, config: TrainerConfig, loss_config: LossConfig, device: torch.device
    ) -> None:
        self._logprobs = logprobs
        self._loss_config = loss_config
        self._device = device
        backend = config.prefix_tree_backend
        self._trees = None
        if config.prefix_tree != "off":
            self._trees = TreeScorer(logprobs, backend="auto" if backend == "depth_first" else backend, device=device)
        unsupported = self._trees.unsupported if self._trees else None
        if unsupported is not None and config.prefix_tree == "on":
            raise SetupError(
                f"prefix_tree = 'on', but {type(logprobs.model).__name__} cannot share forwards over a prefix tree: "
                f"{unsupported}; set it to 'auto' or 'off', which train the same"
            )
        if unsupported is not None:
            logger.warning(
                "%s cannot share forwards over a prefix tree: %s. Each sample is forwarded by itself, which is slower "
                "and changes no gradient; prefix_tree = 'off' says the same",
                type(logprobs.model).__name__,
                unsupported,
            )
        self.supports_trees = unsupported is None
        modes: dict[str, Literal["always", "large"]] = {"depth_first": "always", "auto": "large"}
        self._rules = SharingRules(
            mode=config.prefix_tree if self.supports_trees else "off",
            min_sharing=config.prefix_tree_min_sharing,
            depth_first=modes.get(backend, "never"),
            max_tokens=config.micro_batch_tokens,
        )
        self._depth_first = DepthFirst(logprobs, max_tokens=config.micro_batch_tokens)

    def run(self, update: Update) -> PassResult:
        """Add the update's gradient to those of the parameters.

        Rows whose advantage is zero have no gradient and are not forwarded; where all are so, all are
        forwarded without gradient, to be measured.
        """
        active = [row for row in update.rows if update.credit.advantages[row.episode] != 0.0]
        total = PassResult()
        with torch.set_grad_enabled(bool(active)):
            for part in self._parts(active or update.rows, update=update):
                total += part
        return total

    def _parts(self, rows: Sequence[Row], *, update: Update) -> Iterator[PassResult]:
        plan = plan_forwards(rows, rules=self._rules)
        budget = self._rules.max_tokens
        for micro in micro_batches(plan.plain, credit=update.credit, max_tokens=budget, device=self._device):
            yield self._padded(micro, update=update)
        for tree in plan.trees:
            yield self._tree(tree, update=update)
        for tree in plan.deep:
            yield self._deep(tree, update=update)

    def _padded(self, micro: MicroBatch, *, update: Update) -> PassResult:
        scored = self._logprobs(
            micro.input_ids_BT,
            attention_mask_BT=micro.attention_mask_BT,
            rows_N=micro.rows_N,
            sources_N=micro.sources_N,
            targets=micro.targets,
        )
        return self._backward(
            micro.facts.scored(*scored, on_policy_version=update.on_policy_version),
            row_tokens=micro.num_tokens,
            forward_tokens=micro.num_tokens,
        )

    def _tree(self, rows: Sequence[Row], *, update: Update) -> PassResult:
        assert self._trees is not None, "trees are planned only where a scorer exists"
        plan = TreePlan.of(rows)
        facts = TokenFacts.of(rows, credit=update.credit, device=self._device)
        with self._trees.scored(plan) as scored:
            return self._backward(
                facts.scored(*scored, on_policy_version=update.on_policy_version),
                row_tokens=plan.row_tokens,
                forward_tokens=plan.num_tokens,
            )

    def _backward(self, tokens: TokenBatch, *, row_tokens: int, forward_tokens: int) -> PassResult:
        loss = policy_loss(tokens, config=self._loss_config)
        if torch.is_grad_enabled():
            loss.backward()
        stats = token_stats(tokens, config=self._loss_config)
        return PassResult(float(loss.detach()), stats, row_tokens=row_tokens, forward_tokens=forward_tokens)

    def _deep(self, rows: Sequence[Row], *, update: Update) -> PassResult:
        plan = TreePlan.of(rows)
        facts = TokenFacts.of(rows, credit=update.credit, device=self._device)

        def loss_of(places_N: Ints, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
            some = facts.take(torch.from_numpy(places_N).to(self._device))
            tokens = some.scored(logprobs_N, entropy_N, on_policy_version=update.on_policy_version)
            return policy_loss(tokens, config=self._loss_config)

        result = self._depth_first.run(plan, trained_R=[row.num_trained for row in rows], loss_of=loss_of)
        tokens = facts.scored(result.logprobs_N, result.entropy_N, on_policy_version=update.on_policy_version)
        stats = token_stats(tokens, config=self._loss_config)
        return PassResult(float(result.loss), stats, row_tokens=plan.row_tokens, forward_tokens=plan.num_tokens)
