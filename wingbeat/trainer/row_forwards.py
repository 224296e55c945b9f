"""Forwards over rows, sharing what they share: trees, trees one path at a time, packed streams, padded micro-batches.

A stream is a forest whose trees are single rows, so packing needs no attention of its own: each row is one causal
block, at its own positions, and nothing is padded.

Training (:mod:`wingbeat.trainer.update`) and scoring without gradient use the same machinery, so a token's logprob is
the same number in both.

Letters: ``N`` trained tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import SetupError
from wingbeat.trainer.batching import MicroBatch, collate, padded_tokens, plan_micro_batches, plan_packs
from wingbeat.trainer.depth_first import DepthFirst, DepthFirstResult, RowsLoss
from wingbeat.trainer.forwards import SharingRules, plan_forwards
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.memory import ForwardBudget, ForwardSize
from wingbeat.trainer.rows import Row
from wingbeat.trainer.sharding import ALONE, Sharding
from wingbeat.trainer.tree_plan import TreePlan
from wingbeat.trainer.tree_scorer import TreeScorer

logger = logging.getLogger(__name__)

MIN_FILL = 0.97
"""Share of tokens that are no padding, below which ``sequence_packing = "auto"`` packs: above it there is little to
gain, and padded rows attend in fewer calls."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward to be run."""

    rows: Sequence[Row]
    row_tokens: int
    forward_tokens: int
    """Without padding."""
    source: MicroBatch | TreePlan
    size: ForwardSize
    depth_first: bool = False
    """A tree that is to be walked (:meth:`RowForwards.walk`), not scored at once."""

    @property
    def padded_tokens(self) -> int:
        """Tokens that were forwarded, padding included."""
        return self.source.input_ids_BT.numel() if isinstance(self.source, MicroBatch) else self.forward_tokens

    @classmethod
    def padded(cls, rows: list[Row], *, device: torch.device) -> Forward:
        micro = collate(rows, device=device)
        size = ForwardSize(len(rows), micro.input_ids_BT.numel(), micro.input_ids_BT.shape[1])
        return cls(rows, micro.num_tokens, micro.num_tokens, micro, size)

    @classmethod
    def tree(cls, rows: Sequence[Row], *, max_tokens: int | None = None) -> Forward:
        """With ``max_tokens`` it is walked depth first, in pieces of so many."""
        plan = TreePlan.of(rows)
        longest = plan.longest_path
        at_once = plan.num_tokens if max_tokens is None else min(plan.num_tokens, max(max_tokens, longest))
        size = ForwardSize(len(rows), at_once, longest)
        return cls(rows, plan.row_tokens, plan.num_tokens, plan, size, depth_first=max_tokens is not None)

    @classmethod
    def packed(cls, rows: Sequence[Row]) -> Forward:
        plan = TreePlan.of(rows, shares=False)
        return cls(
            rows, plan.row_tokens, plan.num_tokens, plan, ForwardSize(len(rows), plan.num_tokens, plan.longest_path)
        )


class RowForwards:
    """Plans and runs forwards over rows, as the config says and as large as ``budget`` (unset: one of its own) allows.

    With ``sharding``, several processes run them.
    A model that cannot be driven over a tree keeps its rows; that is logged once, here.  Where the config
    demands trees or packing (``"on"``) it is refused instead: SetupError.
    """

    def __init__(
        self,
        logprobs: LogprobModel,
        *,
        config: TrainerConfig,
        device: torch.device,
        budget: ForwardBudget | None = None,
        sharding: Sharding = ALONE,
    ) -> None:
        self._logprobs = logprobs
        self._device = device
        self.sharding = sharding
        self.budget = budget or ForwardBudget(config.micro_batch_tokens)
        backend = config.prefix_tree_backend
        self._trees = None
        if config.prefix_tree != "off" or config.sequence_packing != "off":
            self._trees = TreeScorer(logprobs, backend="auto" if backend == "depth_first" else backend, device=device)
        unsupported = self._trees.unsupported if self._trees else None
        if unsupported is not None:
            demands = {"prefix_tree": config.prefix_tree, "sequence_packing": config.sequence_packing}
            demanded = [key for key, value in demands.items() if value == "on"]
            _tell_unsupported(type(logprobs.model).__name__, unsupported, demanded=demanded)
        self.supports_trees = unsupported is None
        modes: dict[str, Literal["always", "large"]] = {"depth_first": "always", "auto": "large"}
        self._rules = SharingRules(
            mode=config.prefix_tree if self.supports_trees else "off",
            min_sharing=config.prefix_tree_min_sharing,
            depth_first=modes.get(backend, "never") if sharding.walks else "never",
            max_tokens=config.micro_batch_tokens,
        )
        self._packing = config.sequence_packing if self.supports_trees else "off"
        if self._packing == "auto" and not (device.type == "cpu" or (self._trees and self._trees.backend == "flex")):
            self._packing = "off"  # written-out attention per row would cost more than padding does
        self._width: int = logprobs.model.get_input_embeddings().weight.shape[1]

    @property
    def shares(self) -> bool:
        """Whether rows that begin alike are forwarded together."""
        return self._rules.mode != "off"

    def plan(self, rows: Sequence[Row]) -> Iterator[Forward]:
        """Each row that trains a token, once."""
        max_tokens = self.budget.tokens
        forwards = plan_forwards(rows, rules=replace(self._rules, max_tokens=max_tokens))
        yield from self._plain(forwards.plain, max_tokens=max_tokens)
        for tree in forwards.trees:
            yield Forward.tree(tree)
        for tree in forwards.deep:
            yield Forward.tree(tree, max_tokens=max_tokens)

    def _plain(self, rows: Sequence[Row], *, max_tokens: int) -> Iterator[Forward]:
        """Rows that share too little to make trees: padded where that costs little, else packed."""
        lengths = [row.num_tokens for row in rows]
        padded = plan_micro_batches(lengths, max_tokens=max_tokens)
        fill = sum(lengths) / max(1, padded_tokens(lengths, padded))
        if self._packing == "on" or (self._packing == "auto" and fill < MIN_FILL):
            for part in plan_packs(lengths, max_tokens=max_tokens, width=self._width):
                yield Forward.packed([rows[index] for index in part])
        else:
            for part in padded:
                yield Forward.padded([rows[index] for index in part], device=self._device)

    @contextmanager
    def scored(self, forward: Forward) -> Iterator[tuple[Tensor, Tensor]]:
        """Logprobs and entropies [N] of the rows' trained tokens, row by row; call backward within the context.

        Raises DoesNotFit where memory runs out, there too.
        """
        source = forward.source
        with self.budget.holding(forward.size):
            if isinstance(source, MicroBatch):
                yield self._logprobs(
                    source.input_ids_BT,
                    attention_mask_BT=source.attention_mask_BT,
                    rows_N=source.rows_N,
                    sources_N=source.sources_N,
                    targets=source.targets,
                )
                return
            assert self._trees is not None, "trees are planned only where a scorer exists"
            with self._trees.scored(source) as found:
                yield found

    def walk(self, forward: Forward, *, loss_of: RowsLoss) -> DepthFirstResult:
        """Run a depth-first forward, and its backward where gradients are on.  Raises DoesNotFit."""
        assert isinstance(forward.source, TreePlan)
        trained_R = [row.num_trained for row in forward.rows]
        with self.budget.holding(forward.size):
            walker = DepthFirst(self._logprobs, max_tokens=forward.size.num_tokens)
            return walker.run(forward.source, trained_R=trained_R, loss_of=loss_of)

    def score(self, rows: Sequence[Row]) -> dict[int, NDArray[Any]]:
        """The logprobs [N] of each row's trained tokens, by ``Row.index``; rows without one have none."""
        return self.budget.until_it_fits(lambda: self._score(rows), clean=lambda: None)

    @torch.no_grad()
    def _score(self, rows: Sequence[Row]) -> dict[int, NDArray[Any]]:
        found: dict[int, NDArray[Any]] = {}
        trained = [row for row in rows if row.num_trained]
        with self.sharding.running(gradient=False):
            for forward in self.sharding.matched(self.plan(self.sharding.own(trained, shares=self.shares))):
                counts = [row.num_trained for row in forward.rows]
                for row, logprobs_N in zip(forward.rows, self._values(forward).cpu().split(counts), strict=True):
                    found[row.index] = logprobs_N.numpy()
        return self.sharding.joined(trained, found)

    def _values(self, forward: Forward) -> Tensor:
        if forward.depth_first:
            return self.walk(forward, loss_of=lambda _places, logprobs_N, _entropy: logprobs_N.sum()).logprobs_N
        with self.scored(forward) as (logprobs_N, _entropy_N):
            return logprobs_N


def _tell_unsupported(model: str, why: str, *, demanded: Sequence[str]) -> None:
    if demanded:
        raise SetupError(
            f"{demanded[0]} = 'on', but {model} cannot share forwards over a prefix tree: {why}; set it to 'auto' or "
            "'off', which train the same"
        )
    logger.warning(
        "%s cannot share forwards over a prefix tree: %s. Each sample is forwarded by itself, padded, which is slower "
        "and changes no gradient; prefix_tree = 'off' with sequence_packing = 'off' says the same",
        model,
        why,
    )
