"""Forwards over rows, sharing what they share: padded micro-batches, trees, and trees one path at a time.

Training (:mod:`wingbeat.trainer.update`) and scoring without gradient use the same machinery, so a token's logprob is
the same number in both.

Letters: ``N`` trained tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import SetupError
from wingbeat.trainer.batching import MicroBatch, micro_batches
from wingbeat.trainer.depth_first import DepthFirst, DepthFirstResult, RowsLoss
from wingbeat.trainer.forwards import SharingRules, plan_forwards
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import TreePlan
from wingbeat.trainer.tree_scorer import TreeScorer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward to be run."""

    rows: Sequence[Row]
    row_tokens: int
    forward_tokens: int
    """Without padding."""
    source: MicroBatch | TreePlan
    depth_first: bool = False
    """A tree that is to be walked (:meth:`RowForwards.walk`), not scored at once."""

    @classmethod
    def tree(cls, rows: Sequence[Row], *, depth_first: bool) -> Forward:
        plan = TreePlan.of(rows)
        return cls(rows, plan.row_tokens, plan.num_tokens, plan, depth_first)


class RowForwards:
    """Plans and runs forwards over rows, as the config says.

    A model that cannot be driven over a tree keeps its rows; that is logged once, here.  Where the config
    demands trees (``prefix_tree = "on"``) it is refused instead: SetupError.
    """

    def __init__(self, logprobs: LogprobModel, *, config: TrainerConfig, device: torch.device) -> None:
        self._logprobs = logprobs
        self._device = device
        backend = config.prefix_tree_backend
        self._trees = None
        if config.prefix_tree != "off":
            self._trees = TreeScorer(logprobs, backend="auto" if backend == "depth_first" else backend, device=device)
        unsupported = self._trees.unsupported if self._trees else None
        if unsupported is not None:
            _tell_unsupported(type(logprobs.model).__name__, unsupported, demanded=config.prefix_tree == "on")
        self.supports_trees = unsupported is None
        modes: dict[str, Literal["always", "large"]] = {"depth_first": "always", "auto": "large"}
        self._rules = SharingRules(
            mode=config.prefix_tree if self.supports_trees else "off",
            min_sharing=config.prefix_tree_min_sharing,
            depth_first=modes.get(backend, "never"),
            max_tokens=config.micro_batch_tokens,
        )
        self._depth_first = DepthFirst(logprobs, max_tokens=config.micro_batch_tokens)

    def plan(self, rows: Sequence[Row]) -> Iterator[Forward]:
        """Each row that trains a token, once."""
        forwards = plan_forwards(rows, rules=self._rules)
        for micro in micro_batches(forwards.plain, max_tokens=self._rules.max_tokens, device=self._device):
            yield Forward(micro.rows, micro.num_tokens, micro.num_tokens, micro)
        for tree in forwards.trees:
            yield Forward.tree(tree, depth_first=False)
        for tree in forwards.deep:
            yield Forward.tree(tree, depth_first=True)

    @contextmanager
    def scored(self, forward: Forward) -> Iterator[tuple[Tensor, Tensor]]:
        """Logprobs and entropies [N] of the rows' trained tokens, row by row; call backward within the context."""
        source = forward.source
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
        """Run a depth-first forward, and its backward where gradients are on."""
        assert isinstance(forward.source, TreePlan)
        trained_R = [row.num_trained for row in forward.rows]
        return self._depth_first.run(forward.source, trained_R=trained_R, loss_of=loss_of)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> dict[int, NDArray[Any]]:
        """The logprobs [N] of each row's trained tokens, by ``Row.index``; rows without one have none."""
        found: dict[int, NDArray[Any]] = {}
        for forward in self.plan([row for row in rows if row.num_trained]):
            counts = [row.num_trained for row in forward.rows]
            for row, logprobs_N in zip(forward.rows, self._values(forward).cpu().split(counts), strict=True):
                found[row.index] = logprobs_N.numpy()
        return found

    def _values(self, forward: Forward) -> Tensor:
        if forward.depth_first:
            return self.walk(forward, loss_of=lambda _places, logprobs_N, _entropy: logprobs_N.sum()).logprobs_N
        with self.scored(forward) as (logprobs_N, _entropy_N):
            return logprobs_N


def _tell_unsupported(model: str, why: str, *, demanded: bool) -> None:
    if demanded:
        raise SetupError(
            f"prefix_tree = 'on', but {model} cannot share forwards over a prefix tree: {why}; set it to 'auto' or "
            "'off', which train the same"
        )
    logger.warning(
        "%s cannot share forwards over a prefix tree: %s. Each sample is forwarded by itself, which is slower "
        "and changes no gradient; prefix_tree = 'off' says the same",
        model,
        why,
    )
