"""From what a token was drawn, as far as vLLM lets it be known exactly.

Logprobs are those after grammar, top-k and top-p, so a token that could not be drawn has minus infinity.  The most
probable tokens are listed with each sampled one: where the list reaches a token that could not be drawn, what stands
before is all that could.  A grammar alone may allow more than fits into the list; there our own compiler of the same
grammar says what, if the list agrees with it.  What cannot be known is not guessed: the token gets no logprob, and
does not train.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.support import WHOLE_VOCABULARY, encode_support
from wingbeat.core.types import SamplingParams
from wingbeat.engines.vllm.wire import Candidates

LISTED_WITH_GRAMMAR = 16
"""Enough to see whole what is mostly forced."""
BEYOND_TOP_K = 2
"""Listed beyond top-k, so that its end is seen: one may be the sampled token once more."""


@dataclass(frozen=True, slots=True)
class Support:
    """Of one token."""

    blob: bytes = WHOLE_VOCABULARY
    is_known: bool = True
    """False where the token must not train."""


def candidates_for(sampling: SamplingParams, *, most: int, vocabulary: int) -> int:
    """How many of the most probable tokens to ask for; 0 where the sampled one is enough."""
    most = min(most, vocabulary)
    if sampling.temperature == 0 or not is_restricted(sampling):
        return 0
    if sampling.top_k > 0:
        return min(sampling.top_k + BEYOND_TOP_K, most)
    return most if sampling.top_p < 1 else min(LISTED_WITH_GRAMMAR, most)


def is_restricted(sampling: SamplingParams) -> bool:
    return bool(sampling.grammar) or sampling.top_k > 0 or sampling.top_p < 1


def support_of(
    token: int,
    candidates: Candidates,
    sampling: SamplingParams,
    *,
    vocabulary: int,
    allowed: Callable[[], NDArray[np.bool_] | None] = lambda: None,
) -> Support:
    """Of a sampled token.  ``allowed`` gives [V] what the grammar allows there by our own compiler, if that knows it;
    it is asked only where the list does not say it all."""
    if sampling.temperature == 0 or not is_restricted(sampling):
        return Support()
    drawable = {number for number, logprob in candidates if logprob > -math.inf}
    if token not in drawable:
        return Support(is_known=False)
    listed_V = np.zeros(vocabulary, np.bool_)
    listed_V[list(drawable)] = True
    if len(drawable) < len({number for number, _ in candidates}) or len(drawable) == vocabulary:
        return Support(encode_support(listed_V))
    if sampling.top_k > 0 or sampling.top_p < 1:
        return Support(is_known=False)
    allowed_V = allowed()
    if allowed_V is None or not allowed_V[listed_V].all():
        return Support(is_known=False)
    return Support(encode_support(allowed_V))
