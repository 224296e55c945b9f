"""One request: what vLLM says of it, as token events that name versions and supports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from wingbeat.core.errors import WingbeatError
from wingbeat.core.ports import GenerateRequest, TokenEvent
from wingbeat.core.support import WHOLE_VOCABULARY
from wingbeat.engines.embedded.grammar import Constraint, GrammarCompiler
from wingbeat.engines.vllm.supports import support_of
from wingbeat.engines.vllm.wire import Piece, Submission

SampledBy = Callable[[str], tuple[int, int]]
"""(version, lineage) of the weights with a label."""


class GrammarWalk:
    """Where a reply stands in its grammar, walked here beside vLLM."""

    def __init__(self, compiler: GrammarCompiler, grammar: str, *, end: int) -> None:
        """``end``: the one stop token that vLLM lets a grammar end with."""
        self._compiler = compiler
        self._compiled: Future[LLMatcher] = compiler.compile(grammar)
        self._end = end
        self._constraint: Constraint | None = None
        self._is_lost = False

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or cannot be."""
        return self._compiled.done()

    def fault(self) -> str:
        """Once it is ready: why there is no such grammar, or ""."""
        if self._constraint is None:
            try:
                matcher = self._compiled.result().deep_copy()
            except WingbeatError as error:
                return error.message
            self._constraint = Constraint(matcher, stops=[self._end])
        return ""

    def allowed(self, *, vocabulary: int) -> NDArray[np.bool_] | None:
        """[V] what may come next; None where that is not known."""
        if self._constraint is None or self._is_lost:
            return None
        allowed_GV, faults = self._compiler.masks([self._constraint], vocabulary=vocabulary)
        return None if faults[0] else allowed_GV[0]

    def advance(self, token: int) -> None:
        if self._constraint is not None and token != self._end and not self._is_lost:
            self._is_lost = bool(self._constraint.advance([token]))


@dataclass(slots=True)
class ActiveRequest:
    """A request between its submission and its end."""

    request: GenerateRequest
    model: str
    submission: Submission
    """The latest: a lost server's requests are submitted again."""
    vocabulary: int
    walk: GrammarWalk | None = None
    sampled: list[int] = field(default_factory=list)
    counted: int = 0
    """Tokens of the latest submission that came."""
    held: list[Piece] = field(default_factory=list)
    """What came before the grammar was compiled here."""
    tries: int = 0

    @property
    def id(self) -> str:
        return self.request.request_id

    def again(self, stream: int, *, salt: str) -> None:
        """Its submission is now what is left of it, for a new server; the same draws do not come again."""
        sampling = self.request.sampling
        done = len(self.sampled)
        left = replace(
            sampling,
            max_tokens=sampling.max_tokens - done,
            seed=None if sampling.seed is None else sampling.seed + done,
        )
        self.submission = replace(
            self.submission,
            stream=stream,
            prompt_ids=[*self.request.prompt_ids, *self.sampled],
            sampling=left,
            salt=salt,
        )
        self.counted = 0
        self.tries += 1

    def fault(self, piece: Piece) -> str:
        """Why this cannot go on, or ""."""
        count = len(piece.token_ids)
        told = sum(end - begin for begin, end, _ in _runs(piece, self.counted))
        if told != count or len(piece.logprobs) != count:
            return "vLLM did not say with which weights and logprobs it sampled: it was not started for Wingbeat"
        return "" if self.walk is None else self.walk.fault()

    def events(self, piece: Piece, sampled_by: SampledBy) -> list[TokenEvent]:
        """One per version among the piece's tokens; the last carries the end."""
        events: list[TokenEvent] = []
        for begin, end, label in _runs(piece, self.counted):
            logprobs, supports = self._drawn(piece, begin, end)
            version, lineage = sampled_by(label)
            tokens = piece.token_ids[begin:end]
            events.append(TokenEvent(self.id, tokens, logprobs, version, supports=supports, lineage=lineage))
        self.counted += len(piece.token_ids)
        self.sampled.extend(piece.token_ids)
        if piece.finish is not None:
            version, lineage = sampled_by("")
            last = events.pop() if events else TokenEvent(self.id, (), (), version, lineage=lineage)
            events.append(replace(last, finish_reason=piece.finish))
        return events

    def _drawn(self, piece: Piece, begin: int, end: int) -> tuple[tuple[float, ...], tuple[bytes, ...]]:
        """Logprobs and supports of tokens ``begin`` to ``end`` of a piece."""
        if not piece.candidates:
            return piece.logprobs[begin:end], ()
        logprobs, blobs = list(piece.logprobs[begin:end]), [WHOLE_VOCABULARY] * (end - begin)
        for i in range(begin, end):
            support = support_of(
                piece.token_ids[i],
                piece.candidates[i],
                self.request.sampling,
                vocabulary=self.vocabulary,
                allowed=self._allowed,
            )
            blobs[i - begin] = support.blob
            if not support.is_known:
                logprobs[i - begin] = math.nan
            if self.walk is not None:
                self.walk.advance(piece.token_ids[i])
        return tuple(logprobs), tuple(blobs) if any(blobs) else ()

    def _allowed(self) -> NDArray[np.bool_] | None:
        return None if self.walk is None else self.walk.allowed(vocabulary=self.vocabulary)


def _runs(piece: Piece, before: int) -> Iterator[tuple[int, int, str]]:
    """(begin, end, label) of the piece's tokens that one version sampled; ``before`` of the reply came earlier."""
    count = len(piece.token_ids)
    for span in piece.spans or ():
        begin, end = max(span.begin - before, 0), min(span.end - before, count)
        if begin < end:
            yield begin, end, span.label
