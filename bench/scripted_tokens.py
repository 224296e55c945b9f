"""Tokens of a scripted engine: from a reply's text to what an engine sends."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wingbeat.core.support import encode_support
from wingbeat.core.types import FinishReason
from wingbeat.core.worker_protocol import Generate, PolicySpec, TokenChunk
from wingbeat.tracking.template import ChatTemplate


def logprob_of(token_id: int) -> float:
    """Scripted logprobs differ from token to token, so that a shift by one is seen."""
    return -(1 + token_id % 16) / 8


class Vocabulary:
    """A policy's tokenizer, as a scripted engine needs it."""

    def __init__(self, spec: PolicySpec) -> None:
        path = spec.config.get("chat_template")
        source = Path(path).read_text(encoding="utf-8") if path else None
        self._template = ChatTemplate.load(Path(spec.model), template=source)
        (self.end_id,) = self._template.encode(self._template.eot_text)[:1] or self._template.eos_token_ids[:1]
        self.sample = functools.lru_cache(maxsize=4096)(self._sample)

    def _sample(self, text: str, ends: bool) -> tuple[int, ...]:
        """What is "sampled" for a text."""
        return (*self._template.encode(text), *((self.end_id,) if ends else ()))

    def decode(self, prompt_ids: bytes) -> str:
        return self._template.decode(np.frombuffer(prompt_ids, "<i4").tolist())


class Place(NamedTuple):
    """The weights that are said to have sampled."""

    lineage: int = 0
    version: int = 0


def make_chunk(message: Generate, ids: tuple[int, ...], place: Place, finish: FinishReason | None) -> TokenChunk:
    """Under a truncation or a grammar, the token drawn was the only one allowed."""
    is_forced = bool(message.grammar or message.top_k or message.top_p < 1)
    return TokenChunk(
        message.request_id,
        ids,
        tuple(0.0 if is_forced else logprob_of(i) for i in ids),
        place.version,
        finish,
        supports=tuple(_only(i) for i in ids) if is_forced else (),
        lineage=place.lineage,
    )


def _only(token_id: int) -> bytes:
    allowed_V = np.zeros(token_id + 2, np.bool_)
    allowed_V[token_id] = True
    return encode_support(allowed_V)
