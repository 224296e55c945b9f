"""The vocabulary of Wingbeat as frozen values (no torch, no numpy: the light client imports this).

A *task* is what to solve; an *episode* is one attempt at it; a *turn* is one model call; a *group* is
the episodes of one task that share a baseline; a *policy* is a named trainable model whose *version*
grows by one per published optimiser step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How an episode ended.  Only ``AGENT`` outcomes ever reach a baseline."""

    AGENT = "agent"
    """The episode ran to its end, well or badly: trained with its reward."""
    ENVIRONMENT = "environment"
    """The environment (simulator, scorer, tool) broke."""
    INFRASTRUCTURE = "infrastructure"
    """Our side broke: engine, server, network."""
    CLIENT = "client"
    """The agent's own code raised, or the client vanished."""
    TIMEOUT = "timeout"
    """A deadline passed."""


class Split(StrEnum):
    """Whether an episode may train (``TRAIN``) or only measures (``EVAL``)."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why generation of a turn ended."""

    STOP = "stop"
    """An end-of-turn token or a stop string was sampled."""
    LENGTH = "length"
    """``max_tokens`` or the context ran out; the text is truncated."""
    ABORT = "abort"
    """The caller went away or asked to stop."""
    ERROR = "error"
    """The engine failed on this request."""


class Provenance(StrEnum):
    """Where a token came from.  Only ``SAMPLED`` tokens train."""

    SAMPLED = "sampled"
    RENDERED = "rendered"
    FORCED = "forced"


@dataclass(frozen=True, slots=True)
class Task:
    """What to solve: ``source`` names the collection, ``id`` is unique in it."""

    source: str
    id: str
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task that share a baseline."""

    id: str
    size: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine draws tokens.

    Logprobs are always those of the distribution sampled from, that is after temperature, grammar,
    top-k and top-p.  ``temperature`` 0 means greedy (allowed in evaluation only; its logprobs are those of the
    untempered distribution).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches top-k off."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    """What the reply must match, as llguidance's Lark dialect; "" leaves it free."""
    resumed_tokens: int = 0
    """How many of the prompt's last tokens this reply already sampled, on an engine that is gone: the
    grammar has consumed them, and they count for nothing else."""
