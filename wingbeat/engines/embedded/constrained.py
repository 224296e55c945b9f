"""The engine's requests that have a grammar: held while it is compiled, masked while they decode.

Compiling happens in another thread, so the other requests of an engine are decoded meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import torch
from llguidance import LLMatcher
from torch import Tensor

from wingbeat.core.errors import WingbeatError
from wingbeat.engines.embedded.grammar import Constraint, GrammarCompiler
from wingbeat.engines.embedded.requests import ActiveRequest
from wingbeat.engines.embedded.sampler import Masks


class ConstrainedRequests:
    """``compiler`` None: the engine knows no tokenizer and refuses grammars."""

    def __init__(self, compiler: GrammarCompiler | None, *, vocabulary: int) -> None:
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._held: dict[str, tuple[ActiveRequest, Future[LLMatcher]]] = {}

    def fault(self, grammar: str, *, stops: Iterable[int]) -> str:
        """Why a request with this grammar cannot be served; empty if it can, or has none."""
        if not grammar:
            return ""
        if self._compiler is None:
            return "a grammar needs the model's tokenizer, and this engine has none: construct it with `grammars`"
        if not any(0 <= token < self._vocabulary for token in stops):
            return "a grammar needs stop tokens, without which the reply could not end: give stop_token_ids"
        return ""

    def hold(self, request: ActiveRequest, grammar: str) -> None:
        """Keep a faultless request until its grammar is compiled."""
        assert self._compiler is not None, "refused by fault()"
        self._held[request.id] = (request, self._compiler.compile(grammar))

    def drop(self, request: ActiveRequest) -> None:
        """Forget a held request."""
        del self._held[request.id]

    def ready(self, *, wait_s: float) -> list[tuple[ActiveRequest, str]]:
        """Held requests that can start, in order, and why one cannot; waits so long for the first of those held."""
        if not self._held:
            return []
        if wait_s:
            wait([compiled for _, compiled in self._held.values()], timeout=wait_s, return_when=FIRST_COMPLETED)
        done = [held for held in self._held.values() if held[1].done()]
        for request, _ in done:
            del self._held[request.id]
        return [(request, _begin(request, compiled)) for request, compiled in done]

    def masks(self, sampling: Sequence[ActiveRequest], *, logits_BV: Tensor) -> tuple[Masks | None, dict[int, str]]:
        """What the grammars among ``sampling`` allow next, and by index why one of these cannot go on."""
        rows = [i for i, request in enumerate(sampling) if request.constraint is not None]
        constraints = [request.constraint for request in sampling if request.constraint is not None]
        if self._compiler is None or not constraints:
            return None, {}
        allowed_GV, faults = self._compiler.masks(constraints, vocabulary=logits_BV.shape[1])
        masks = Masks(rows, torch.from_numpy(allowed_GV).to(logits_BV.device))
        return masks, {row: fault for row, fault in zip(rows, faults, strict=True) if fault}


def _begin(request: ActiveRequest, compiled: Future[LLMatcher]) -> str:
    """Give a request its constraint, past what it sampled elsewhere; why that is impossible, or ""."""
    try:
        matcher = compiled.result().deep_copy()
    except WingbeatError as error:
        return error.message
    request.constraint = Constraint(matcher, stops=request.stops)
    resumed = request.tokens[len(request.tokens) - request.resumed_tokens :]
    return request.constraint.advance(resumed) if resumed else ""
