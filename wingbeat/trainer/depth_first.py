"""A tree of tokens one root-to-leaf path at a time, for trees that are larger than memory.

The tree is cut into pieces, and the pieces are walked depth first.  On the way down a piece runs forward on
the keys and values of its path; on the way up it runs backward, after everything below it.  What the pieces
below did with its keys and values has by then been added up and is one more gradient, so nothing is computed
twice and the gradients are exact.  Alive at once is one path: its activations (the layers' inputs only, under
gradient checkpointing), its keys and values, and their gradients.  The order is that of DTA (arXiv 2602.00482).

    root ──▶ a ──▶ leaf 1      forward   root, a, leaf 1, leaf 2, b
             ├───▶ leaf 2      backward  leaf 1, leaf 2, a, b, root
    root ──▶ b

A row's loss is computed as soon as its last logprob is there, on the way down.  The pieces that hold its other
tokens are still waiting for their way up, so a loss may depend on all tokens of a row: any sum over rows.

Letters: ``R`` rows, ``N`` their trained tokens, ``E`` edges of the plan, ``T`` tokens of a piece, ``P`` places
on a path, ``K`` key heads, ``D`` head size, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.tree_attention import BlockAttention, tree_attention
from wingbeat.trainer.tree_plan import Ints, TreePlan
from wingbeat.trainer.tree_scorer import add_at, edge_targets, gather

RowsLoss = Callable[[Ints, Tensor, Tensor], Tensor]
"""The part of the loss that some whole rows contribute: from the places of their tokens among all N, and those
tokens' logprobs and entropies, either of which it may train.  Called once for every row that trains."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``[start, stop)`` of the plan, forwarded at once."""

    start: int
    stop: int
    tout: int
    """Behind the last descendant; ``stop`` where the piece is itself all of its subtrees."""
    depth: int
    """Tokens on the path above it, which every token of the piece sees."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Places that its path takes up, its own included."""
        return self.depth + self.num_tokens


@dataclass(frozen=True, slots=True)
class DepthFirstResult:
    """Detached values of all rows, as one forward over them would have given."""

    loss: Tensor
    logprobs_N: Tensor
    entropy_N: Tensor


def pieces(plan: TreePlan, *, max_tokens: int) -> list[Piece]:
    """The tree in depth-first order: neighbouring subtrees that fit beside their path, else single segments.

    A path and the piece at its end hold at most ``max_tokens``, or as many as the longest path where that is
    longer: segments are never cut.
    """
    depths_S = plan.positions_T[plan.starts_S]
    found: list[Piece] = []
    segment = 0
    while segment < plan.num_segments:
        start, depth, parent = int(plan.starts_S[segment]), int(depths_S[segment]), plan.parents_S[segment]
        stop, after = start, segment
        while (
            after < plan.num_segments
            and plan.parents_S[after] == parent
            and depth + int(plan.touts_S[after]) - start <= max_tokens
        ):
            stop = int(plan.touts_S[after])
            after = int(np.searchsorted(plan.starts_S, stop))
        if stop > start:
            found.append(Piece(start, stop, stop, depth))
            segment = after
        else:
            found.append(Piece(start, int(plan.stops_S[segment]), int(plan.touts_S[segment]), depth))
            segment += 1
    return found


class DepthFirst:
    """Trains trees piece by piece.  ``max_tokens`` bounds the tokens alive at once, see :func:`pieces`."""

    def __init__(self, logprobs: LogprobModel, *, max_tokens: int) -> None:
        self._logprobs = logprobs
        self._max_tokens = max_tokens

    def run(self, plan: TreePlan, *, trained_R: Sequence[int], loss_of: RowsLoss) -> DepthFirstResult:
        """Forward and backward: gradients are added to those of the model's parameters.

        ``trained_R`` is how many tokens each of the plan's rows trains, in the order in which they were given.
        Where gradients are switched off, the same values are measured and nothing is added.
        """
        device = next(self._logprobs.model.parameters()).device
        walk = _Walk(plan, logprobs=self._logprobs, pieces=pieces(plan, max_tokens=self._max_tokens), device=device)
        ended = _ended(plan, trained_R=trained_R, starts=[piece.start for piece in walk.pieces])
        with tree_attention(self._logprobs.decoder):
            for index, piece in enumerate(walk.pieces):
                walk.ascend(until=piece.start)
                walk.descend(piece)
                if index in ended:
                    walk.add_loss(ended[index], loss_of=loss_of)
            walk.ascend(until=plan.num_tokens)
        edge_N = torch.from_numpy(plan.edge_N).to(device)
        return DepthFirstResult(walk.loss, walk.logprobs_E[edge_N], walk.entropy_E[edge_N])


def _ended(plan: TreePlan, *, trained_R: Sequence[int], starts: Sequence[int]) -> dict[int, Ints]:
    """By piece, the places among all N tokens of the rows whose last logprob comes from it."""
    stops_R = np.cumsum(np.asarray(trained_R, np.int64))
    by_piece: dict[int, list[Ints]] = {}
    for count, stop in zip(trained_R, stops_R.tolist(), strict=True):
        if count:
            last = plan.edges.sources_E[plan.edge_N[stop - 1]]
            index = int(np.searchsorted(starts, last, side="right")) - 1
            by_piece.setdefault(index, []).append(np.arange(stop - count, stop))
    return {index: np.concatenate(rows) for index, rows in by_piece.items()}


@dataclass(frozen=True, slots=True)
class _Frame:
    """A piece between its forward and its backward."""

    piece: Piece
    hidden_1TH: Tensor
    logprobs: Tensor
    entropy: Tensor
    edges: slice


class _Walk:
    """The state of one walk: the waiting frames, the path's keys and values, what has come of each edge."""

    def __init__(self, plan: TreePlan, *, logprobs: LogprobModel, pieces: list[Piece], device: torch.device) -> None:
        self.pieces = pieces
        self._plan = plan
        self._model = logprobs
        self._device = device
        self._targets = edge_targets(plan.edges, device=device)
        self._frames: list[_Frame] = []
        self._path = _Path(capacity=max((piece.end for piece in pieces), default=0))
        weight: Tensor = logprobs.model.get_input_embeddings().weight
        empty = torch.zeros(len(plan.edges), dtype=torch.promote_types(weight.dtype, torch.float32), device=device)
        self.logprobs_E, self.entropy_E = empty, empty.clone()
        self._grads_E, self._entropy_grads_E = empty.clone(), empty.clone()
        self.loss = empty.new_zeros(())

    def descend(self, piece: Piece) -> None:
        """Run a piece forward."""
        first, last = np.searchsorted(self._plan.edges.sources_E, (piece.start, piece.stop)).tolist()
        hidden_1TH, logprobs, entropy = self._model.around(lambda: self._forward(piece, first=first, last=last))
        self.logprobs_E[first:last], self.entropy_E[first:last] = logprobs.detach(), entropy.detach()
        self._frames.append(_Frame(piece, hidden_1TH, logprobs, entropy, slice(first, last)))

    def _forward(self, piece: Piece, *, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of the piece; logprobs and entropies of its edges ``[first, last)``."""
        plan = self._plan
        hidden_1TH = self._model.decoder(
            input_ids=self._tensor(plan.tokens_T[piece.start : piece.stop])[None],
            position_ids=self._tensor(plan.positions_T[piece.start : piece.stop])[None],
            attention_mask=None,
            use_cache=False,
            tree=_PieceAttention(plan, piece, path=self._path, device=self._device),
        ).last_hidden_state
        sources = self._tensor(plan.edges.sources_E[first:last] - piece.start)
        targets = self._targets.take(np.arange(first, last))
        return hidden_1TH, *self._model.score(gather(hidden_1TH[0], sources), targets)

    def add_loss(self, places_N: Ints, *, loss_of: RowsLoss) -> None:
        """Take the loss of rows that are complete, and what it wants of their edges."""
        edges = self._tensor(self._plan.edge_N[places_N])
        logprobs = self.logprobs_E[edges].requires_grad_(torch.is_grad_enabled())
        entropy = self.entropy_E[edges].requires_grad_(torch.is_grad_enabled() and self._model.entropy_gradient)
        part = loss_of(places_N, logprobs, entropy)
        trained = ((logprobs, self._grads_E), (entropy, self._entropy_grads_E))
        leaves = [(values, grads_E) for values, grads_E in trained if values.requires_grad]
        if leaves:
            found = torch.autograd.grad(part, [values for values, _ in leaves], materialize_grads=True)
            for grads, (_, grads_E) in zip(found, leaves, strict=True):
                add_at(grads_E, edges, grads)
        self.loss += part.detach()

    def ascend(self, *, until: int) -> None:
        """Run backward the waiting pieces, the deepest first, that end before the token ``until``."""
        while self._frames and self._frames[-1].piece.tout <= until:
            frame = self._frames.pop()
            # Also without a gradient of its own the piece must run backward, for what the pieces below want of it.
            roots = (
                (frame.hidden_1TH, torch.zeros_like(frame.hidden_1TH)),
                (frame.logprobs, self._grads_E[frame.edges]),
                (frame.entropy, self._entropy_grads_E[frame.edges]),
            )
            needed = [(tensor, grad) for tensor, grad in roots if tensor.requires_grad]
            if needed:
                torch.autograd.backward([tensor for tensor, _ in needed], [grad for _, grad in needed])

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


class _Path:
    """Keys, values and their gradients along the open path, by layer."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._layers: dict[int, _Layer] = {}

    def layer(self, index: int, *, key: Tensor, value: Tensor) -> _Layer:
        """Made for the first piece, in the shape of its keys and values [1, K, T, D]."""
        if index not in self._layers:
            dtype = torch.promote_types(key.dtype, torch.float32)
            shapes = [(*tensor.shape[:2], self._capacity, tensor.shape[3]) for tensor in (key, value)]
            self._layers[index] = _Layer(
                keys=key.new_empty(shapes[0]),
                values=value.new_empty(shapes[1]),
                key_grads=key.new_zeros(shapes[0], dtype=dtype),
                value_grads=value.new_zeros(shapes[1], dtype=dtype),
            )
        return self._layers[index]


@dataclass(frozen=True, slots=True)
class _Layer:
    """All [1, K, P, D]; gradients at least float32, zero where no open piece has any."""

    keys: Tensor
    values: Tensor
    key_grads: Tensor
    value_grads: Tensor


class _JoinPath(torch.autograd.Function):
    """``apply(key, value, layer, depth)`` gives all keys and values that a piece sees, its own behind its path's.

    Backwards, the path's share of their gradients waits in ``layer`` for the pieces above, and what the pieces
    below left there for this one joins its own.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, layer: _Layer, depth: int) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.depth = layer, depth
        end = depth + key.shape[2]
        layer.keys[:, :, depth:end], layer.values[:, :, depth:end] = key, value
        # Later pieces write behind ``end`` only, so what was read here stays; .data says so to autograd.
        return layer.keys.data[:, :, :end], layer.values.data[:, :, :end]

    @staticmethod
    def backward(ctx: Any, key_grad: Tensor, value_grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own: list[Tensor] = []
        for waiting, grad in ((ctx.layer.key_grads, key_grad), (ctx.layer.value_grads, value_grad)):
            mine = waiting[:, :, : grad.shape[2]]
            mine += grad
            own.append(mine[:, :, ctx.depth :].to(grad.dtype, copy=True))
            mine[:, :, ctx.depth :] = 0
        return own[0], own[1], None, None


class _PieceAttention:
    """Attends from one piece over its path and itself; the same again when a layer is recomputed."""

    def __init__(self, plan: TreePlan, piece: Piece, *, path: _Path, device: torch.device) -> None:
        self._attend = BlockAttention(with_path(plan, piece), backend="auto", device=device, path=piece.depth)
        self._piece = piece
        self._path = path

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scaling: float, extra: dict[str, Any]
    ) -> Tensor:
        """[1, T, heads, D] from [1, heads, T, D]."""
        joined: Any = _JoinPath.apply(key, value, self._path.layer(layer, key=key, value=value), self._piece.depth)
        return self._attend(query, *joined, layer=layer, scaling=scaling, extra=extra)


def with_path(plan: TreePlan, piece: Piece) -> TreePlan:
    """A piece behind its path, which is one more segment: a plan whose places are those of the keys.

    Its edges are those of ``plan``.
    """
    first, last = np.searchsorted(plan.starts_S, (piece.start, piece.stop)).tolist()
    own, segments, shift = slice(piece.start, piece.stop), slice(first, last), piece.depth - piece.start
    above = [piece.depth] if piece.depth else []
    parents_S = plan.parents_S[segments] - first + len(above)
    return replace(
        plan,
        tokens_T=np.concatenate([np.zeros(piece.depth, np.int64), plan.tokens_T[own]]),
        positions_T=np.concatenate([np.arange(piece.depth), plan.positions_T[own]]),
        tout_T=np.concatenate([np.full(piece.depth, piece.end), np.minimum(plan.tout_T[own], piece.stop) + shift]),
        starts_S=np.concatenate([np.zeros(len(above), np.int64), plan.starts_S[segments] + shift]),
        stops_S=np.concatenate([np.asarray(above, np.int64), plan.stops_S[segments] + shift]),
        touts_S=np.concatenate(
            [np.full(len(above), piece.end), np.minimum(plan.touts_S[segments], piece.stop) + shift]
        ),
        parents_S=np.concatenate([np.full(len(above), -1), np.maximum(parents_S, len(above) - 1)]),
    )
