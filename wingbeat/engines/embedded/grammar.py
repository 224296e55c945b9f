"""Keeping replies within a grammar: which tokens may come next, by llguidance.

    compile (in a thread, once per grammar text) ─▶ Constraint ─▶ masks ─▶ draw ─▶ advance
                                                                   ▲                 │
                                                                   └─────────────────┘

A grammar describes the reply's text up to its end.  Stop tokens are not part of it: they are allowed exactly
where the text may end, all of them, and nothing else is once it must.

Letters: G requests with a grammar, V logits per request (perhaps more than the tokenizer has tokens).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from wingbeat.core.errors import ModelSourceError, RequestError

MAX_COMPILED = 64
"""Grammars kept ready; a compiled one holds kilobytes to a few megabytes."""


OUR_END = "<|wingbeat: the end|>"
"""The library wants a token that ends a text, and would pick one that a family's replies may hold in the middle."""


class Constraint:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: LLMatcher, *, stops: Iterable[int]) -> None:
        self.matcher = matcher
        self.stops = sorted(stops)

    def advance(self, tokens: Sequence[int]) -> str:
        """The reply goes on with these tokens; why it cannot, or ""."""
        if self.matcher.consume_tokens(list(tokens)):
            return ""
        return f"the tokens {list(tokens)[:8]} do not follow the grammar: {_first_line(self.matcher.get_error())}"


class GrammarCompiler:
    """Grammars over the tokenizer of one model folder.

    Nothing is read before the first grammar comes: a tokenizer's index takes seconds to build and some hundred
    megabytes where the vocabulary is large.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._executor: LLExecutor | None = None

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """A matcher to be copied, never to be used.  Fails with RequestError where the grammar is none, with
        ModelSourceError where the folder's tokenizer cannot serve grammars."""
        future = self._compiled.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            future = self._compiled[grammar] = self._thread.submit(self._build, grammar)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def masks(self, constraints: Sequence[Constraint], *, vocabulary: int) -> tuple[NDArray[np.bool_], list[str]]:
        """Which tokens may come next [G, V], and why a reply cannot go on ("" where it can)."""
        assert self._tokenizer is not None, "constraints come from matchers, and those from the tokenizer"
        if self._executor is None:
            self._executor = LLExecutor(num_threads=torch.get_num_threads())
        known = self._tokenizer.vocab_size
        bits = allocate_token_bitmask(len(constraints), known)
        matchers = [(constraint.matcher, index) for index, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, bits)
        flat = np.unpackbits(bits.view(np.uint8), axis=1, count=known, bitorder="little").view(np.bool_)
        allowed_GV = np.zeros((len(constraints), vocabulary), np.bool_)
        allowed_GV[:, :known] = flat[:, :vocabulary]
        allowed_GV[:, [token for token in self._tokenizer.eos_tokens if token < vocabulary]] = False
        return allowed_GV, [_end(c, row_V) for c, row_V in zip(constraints, allowed_GV, strict=True)]

    def _build(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = _read_tokenizer(self._folder)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be used: {_first_line(matcher.get_error())}")
        return matcher


def _end(constraint: Constraint, row_V: NDArray[np.bool_]) -> str:
    """Allow the stop tokens in a row exactly where the reply may end."""
    matcher, vocabulary = constraint.matcher, len(row_V)
    if matcher.is_error():
        return f"the grammar cannot go on: {_first_line(matcher.get_error())}"
    row_V[[token for token in constraint.stops if token < vocabulary]] = matcher.is_accepting()
    if row_V.any():
        return ""
    return "the grammar allows no token of this model here: simplify the schema, or use a model that has the tokens"


def _read_tokenizer(folder: Path) -> LLTokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelSourceError(f"grammars need a readable {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = set(tokenizer.get_vocab().values())
    tokenizer.add_special_tokens([AddedToken(OUR_END, special=True, normalized=False)])
    end = tokenizer.token_to_id(OUR_END)
    if end in known:
        raise ModelSourceError(f"grammars need a vocabulary without holes, got {path}, where id {end} would come twice")
    try:
        return LLTokenizer(tokenizer.to_str(), eos_token=end)
    except ValueError as error:
        raise ModelSourceError(
            f"grammars need a tokenizer over bytes (byte-level BPE, or byte fallback), got {path}: {error}"
        ) from error


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
