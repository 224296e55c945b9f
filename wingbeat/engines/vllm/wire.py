"""The bodies of ``POST /inference/v1/generate``: tokens in, a stream of server-sent events with tokens out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from wingbeat.core.types import FinishReason, SamplingParams

PATH = "/inference/v1/generate"
NO_LOGPROB = -9998.0
"""What is below stands for minus infinity, or for nothing at all."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}

Candidates = tuple[tuple[int, float], ...]
"""Tokens with their logprobs: the one sampled, then the most probable ones."""


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens ``begin`` to ``end`` (of the whole reply) were sampled by the weights with this label."""

    label: str
    begin: int
    end: int


class NotFinite(ValueError):
    """The model's logits are not finite."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream says."""

    stream: int
    """The number of the stream, which is one submission of one request."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    candidates: tuple[Candidates, ...] = ()
    """Per token, where they were asked for."""
    spans: tuple[Span, ...] | None = None
    """Of all tokens so far; None where the server does not say."""
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache; with the last piece."""
    error: str = ""
    """The server cannot serve this request."""
    overflow: bool = False
    """The error: logits are not finite."""
    lost: str = ""
    """The server is gone."""

    @property
    def ends(self) -> bool:
        """Nothing follows."""
        return bool(self.error or self.lost) or self.cached_tokens is not None


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it is sent: also what is left of one whose server was lost."""

    stream: int
    model: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    """``max_tokens`` and ``seed`` of this submission."""
    salt: str
    """Prefix caches are shared within one."""
    candidates: int
    """Most probable tokens to list beside each sampled one."""

    def body(self) -> bytes:
        s = self.sampling
        params: dict[str, Any] = {
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "logprobs": self.candidates,
            "stop_token_ids": list(s.stop_token_ids),
            "ignore_eos": True,  # it is among the stop tokens, or is to be sampled like any other
            "detokenize": False,
        }
        if s.seed is not None:
            params["seed"] = s.seed
        if s.grammar:
            params["structured_outputs"] = {"grammar": s.grammar}
        body = {
            "model": self.model,
            "token_ids": list(self.prompt_ids),
            "sampling_params": params,
            "cache_salt": self.salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return orjson.dumps(body)


class EventSplitter:
    """Bytes of server-sent events to their JSON data."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The events that are whole now.  Raises ValueError where the data is no JSON."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        payloads = (event.removeprefix(b"data: ").strip() for event in events)
        return [orjson.loads(payload) for payload in payloads if payload not in (b"", b"[DONE]")]


def read_piece(stream: int, event: dict[str, Any], *, candidates: int) -> Piece:
    """An event of a stream.  Raises KeyError, TypeError or ValueError where it is none."""
    if "error" in event:
        return Piece(stream, error=str(event["error"]["message"]))
    if not event["choices"]:
        details = event["usage"]["prompt_tokens_details"] or {}
        return Piece(stream, cached_tokens=int(details.get("cached_tokens") or 0))
    (choice,) = event["choices"]
    finish = choice["finish_reason"]
    if finish is not None and finish not in FINISH:
        return Piece(stream, error=f"vLLM ended the request with {finish!r}")
    content = choice["logprobs"]["content"] if choice["logprobs"] is not None else []
    spans = choice["weight_versions"]
    return Piece(
        stream,
        token_ids=tuple(choice["token_ids"] or ()),
        logprobs=tuple(_own_logprob(entry["logprob"]) for entry in content),
        candidates=tuple(_candidates(entry) for entry in content) if candidates else (),
        spans=None if spans is None else tuple(Span(s["version"], s["start"], s["end"]) for s in spans),
        finish=None if finish is None else FINISH[finish],
    )


def _candidates(entry: dict[str, Any]) -> Candidates:
    return tuple((top["token_id"], _logprob(top["logprob"])) for top in entry["top_logprobs"])


def _own_logprob(value: float | None) -> float:
    """What was sampled was possible: there, minus infinity means that it is not known."""
    found = _logprob(value)
    return found if found > -math.inf else math.nan


def _logprob(value: float | None) -> float:
    if value is None:  # NaN has no JSON
        raise NotFinite("a logprob that is no number: non-finite logits, as the weights or this prompt overflow")
    return value if value > NO_LOGPROB else -math.inf
