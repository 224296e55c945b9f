"""Scores all rows of a tree by one forward pass over its tokens.

Not every model can be driven so: linear attention and state spaces carry a state from one place in the tree to
the next, whatever branch that is, and a model may hide a mask of its own.  So construction tries a small tree,
compares with the rows, and watches what each layer asks its attention for; a model that fails keeps its
rows, which is slower and never wrong.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._triton import has_triton

from wingbeat.core.errors import SetupError
from wingbeat.trainer.logprobs import LogprobModel, Targets
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_attention import Attend, BlockAttention, tree_attention
from wingbeat.trainer.tree_flex import FlexAttention, FlexUnusable
from wingbeat.trainer.tree_plan import Edges, TreePlan

logger = logging.getLogger(__name__)

Backend = Literal["auto", "mask", "nodes", "flex"]
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_HONOURED = frozenset({"sliding_window", "softcap", "s_aux", "position_ids", "use_cache", "is_causal", "dropout"})
"""Keywords that either are implemented or say what already holds here."""
_PROBE_ROWS = ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 7, 8), (0, 1, 9, 10, 11), (12, 13, 14))
"""A fork within a branch, one near the root, and a second root; numbers stand for random tokens."""


class TreeScorer:
    """Scores trees with the model of ``scorer``.

    ``unsupported`` says why this model cannot be driven over a tree; None where it can.

    Raises SetupError where ``backend`` does not run on ``device``.  Where "auto" would take FlexAttention, and it
    cannot be compiled, trees attend by matrix products; that is logged.
    """

    def __init__(self, scorer: LogprobModel, *, backend: Backend, device: torch.device) -> None:
        self._scorer = scorer
        self._device = device
        self._backend: Backend = _resolved(backend, device=device)
        try:
            self.unsupported = self._probe()
        except FlexUnusable as error:
            if backend == "flex":
                raise SetupError(
                    f"prefix_tree_backend = 'flex': FlexAttention cannot be compiled here ({error}); install what it "
                    "lacks (Triton wants a C compiler and Python's headers), or use 'auto'"
                ) from error
            logger.warning(
                "FlexAttention cannot be compiled here (%s), so trees attend by matrix products, which is slower and "
                "changes no gradient; Triton wants a C compiler and Python's headers",
                error,
            )
            self._backend = "auto"
            self.unsupported = self._probe()

    @property
    def backend(self) -> Backend:
        """How trees attend; "auto" decides by the shape of each."""
        return self._backend

    @contextmanager
    def scored(self, plan: TreePlan) -> Iterator[tuple[Tensor, Tensor]]:
        """The logprob and entropy [N] of each row's trained tokens, see :meth:`LogprobModel.score`.

        Call backward within the context: gradient checkpointing attends over the tree again there.
        """
        with tree_attention(self._scorer.decoder):
            yield self._scorer.around(lambda: self._scored(plan))

    def _scored(self, plan: TreePlan) -> tuple[Tensor, Tensor]:
        hidden_TH = self._hidden(plan, self._attend(plan))
        sources_E = torch.from_numpy(plan.edges.sources_E).to(self._device)
        targets = edge_targets(plan.edges, device=self._device)
        scored = self._scorer.score(gather(hidden_TH, sources_E), targets)
        edge_N = torch.from_numpy(plan.edge_N).to(self._device)
        logprobs_N, entropy_N = (gather(values_E, edge_N) for values_E in scored)
        return logprobs_N, entropy_N

    def _hidden(self, plan: TreePlan, attend: Attend) -> Tensor:
        tokens_1T, positions_1T = (
            torch.from_numpy(values)[None].to(self._device) for values in (plan.tokens_T, plan.positions_T)
        )
        output: Any = self._scorer.decoder(input_ids=tokens_1T, position_ids=positions_1T, use_cache=False, tree=attend)
        return output.last_hidden_state[0]

    def _attend(self, plan: TreePlan) -> Attend:
        if self._backend == "flex":
            return FlexAttention(plan, device=self._device)
        return BlockAttention(plan, backend=self._backend, device=self._device)

    def _probe(self) -> str | None:
        """Why trees of this model would be wrong, or None."""
        model, decoder = self._scorer.model, self._scorer.decoder
        takes = inspect.signature(decoder.forward).parameters.values()
        passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes)
        if not passes_on or not model._can_set_attn_implementation():
            return "it does not attend through transformers' attention interface"
        config: Any = decoder.config
        types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if types:
            return f"it has layers of type {', '.join(sorted(map(str, types)))}"
        rows = self._probe_rows()
        plan = TreePlan.of(rows)
        watch = _Watch(self._attend(plan))
        try:
            with torch.no_grad(), tree_attention(decoder):
                hidden_TH = self._hidden(plan, watch)
        except SetupError as error:
            return str(error)
        if problem := watch.problem(config):
            return problem
        if not self._agrees(rows, plan, hidden_TH):
            return "its hidden states over a tree differ from those over rows"
        return None

    def _probe_rows(self) -> list[Row]:
        vocabulary = self._scorer.model.get_input_embeddings().num_embeddings
        tokens = np.random.default_rng(0).integers(0, vocabulary, 1 + max(map(max, _PROBE_ROWS))).astype(np.int32)
        return [_all_targets(tokens[list(numbers)]) for numbers in _PROBE_ROWS]

    @torch.no_grad()
    def _agrees(self, rows: list[Row], plan: TreePlan, hidden_TH: Tensor) -> bool:
        got = gather(hidden_TH, torch.from_numpy(plan.edges.sources_E[plan.edge_N]).to(self._device))
        wanted = torch.cat([self._row_hidden(row) for row in rows])
        return self._scorer.agree(got, wanted)

    def _row_hidden(self, row: Row) -> Tensor:
        tokens_1T = torch.from_numpy(row.explaining_T.astype(np.int64))[None].to(self._device)
        output: Any = self._scorer.decoder(input_ids=tokens_1T, use_cache=False)
        return output.last_hidden_state[0]


class _Watch:
    """Passes attention on and notes what the layers ask for."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.windows: list[int | None] = []
        self.unknown: set[str] = set()
        self._tried: set[tuple[Any, ...]] = set()
        """What FlexAttention was asked to compile: layers may differ in their heads and windows."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scaling: float, extra: dict[str, Any]
    ) -> Tensor:
        kind = (query.shape, key.shape, value.shape, extra.get("sliding_window"))
        if isinstance(self._attend, FlexAttention) and kind not in self._tried:
            self._tried.add(kind)
            self._attend.try_out(query, key, value, layer=layer, scaling=scaling, extra=extra)
        self.windows.append(extra.get("sliding_window"))
        self.unknown |= {k for k, v in extra.items() if k not in _HONOURED and v is not None and v is not False}
        if extra.get("is_causal") is False:
            self.unknown.add("is_causal=False")
        return self._attend(query, key, value, layer=layer, scaling=scaling, extra=extra)

    def problem(self, config: Any) -> str | None:
        """A window that a layer has by its config must have reached its attention: small trees would not show it."""
        if self.unknown:
            return f"its attention uses {', '.join(sorted(self.unknown))}"
        if len(self.windows) != config.num_hidden_layers:
            return f"{len(self.windows)} of its {config.num_hidden_layers} layers attend through the interface"
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None)
        if types:
            wanted = [window if kind == "sliding_attention" else None for kind in types]
        else:
            wanted = [window] * len(self.windows)
        if getattr(config, "attention_chunk_size", None) or self.windows != wanted:
            return "its sliding windows or chunks do not reach its attention"
        return None


def edge_targets(edges: Edges, *, device: torch.device) -> Targets:
    """A plan's edges as the head takes them."""
    return Targets(
        targets_N=torch.from_numpy(edges.targets_E).to(device),
        temperatures_N=torch.from_numpy(edges.temperatures_E).to(device),
        supports_N=edges.supports_E,
        support_table=edges.support_table,
    )


def gather(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` whose gradient is summed in one fixed order also where an index repeats.

    Replaying a batch must give the same bits.  On a CPU that is index_add, which runs in order (indexing
    adds in parallel there); on a GPU it is indexing, which sorts.
    """
    return values.index_select(0, index) if values.device.type == "cpu" else values[index]


def add_at(totals: Tensor, index: Tensor, values: Tensor) -> None:
    """``totals[index] += values`` where an index may repeat, in one fixed order for the same reason."""
    if totals.device.type == "cpu":
        totals.index_add_(0, index, values)
    else:
        totals.index_put_((index,), values, accumulate=True)


def _resolved(backend: Backend, *, device: torch.device) -> Backend:
    if backend == "flex" and device.type != "cuda":
        raise SetupError(
            f"prefix_tree_backend = 'flex' needs a CUDA device, got {device.type}: FlexAttention has no backward pass "
            "elsewhere; use 'auto'"
        )
    # FlexAttention compiles its kernels by Triton, which not every machine with CUDA has.
    return "flex" if backend == "auto" and device.type == "cuda" and has_triton() else backend


def _all_targets(tokens_T: NDArray[np.int32]) -> Row:
    """A row whose every token but the first is a target."""
    count = len(tokens_T) - 1
    return Row(
        episode=0,
        token_ids_T=tokens_T,
        targets_N=np.arange(1, count + 1, dtype=np.int64),
        sampling_logprobs_N=np.zeros(count, np.float32),
        versions_N=np.zeros(count, np.int32),
        temperature=1.0,
        num_excluded=0,
        supports_N=np.full(count, -1, np.int32),
    )
