"""Ports: the small protocols through which rank-1 packages meet without importing each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from wingbeat.core.types import FinishReason, SamplingParams, Task


class Clock(Protocol):
    """Monotonic seconds; passed in so that tests own time."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Tokens in.  ``cache_key`` names the episode (a hint for KV reuse); ``prompt_ids`` is the truth."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    cache_key: str = ""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens out: what one decode step added to one request.

    ``policy_version`` is that of every token in this event: no event spans a weight swap.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    finish_reason: FinishReason | None = None
    error: str = ""
    supports: tuple[bytes, ...] = ()
    """One :mod:`wingbeat.core.support` blob per token, or () where every token was drawn from the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine for routing and metrics (counts since start unless said otherwise)."""

    running: int
    """Requests now decoding or prefilling."""
    waiting: int
    """Requests now queued."""
    sampled_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    """Prompt tokens served from KV of earlier turns or shared prefixes."""
    policy_version: int
    kv_tokens_free: int
    """Now."""


class SamplingEngine(Protocol):
    """Generates for one policy at one live version.  Synchronous: its worker owns the loop.

    ``step`` runs exactly one model forward and sees exactly one version; ``update_weights`` may only
    be called between steps and leaves running requests running.
    """

    @property
    def parallelism(self) -> int: ...
    @property
    def policy_version(self) -> int: ...
    def submit(self, request: GenerateRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[TokenEvent]: ...
    def update_weights(self, tensors: Any, *, policy_version: int) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def stats(self) -> EngineStats: ...


class EpisodeSession(Protocol):
    """What an agent or environment sees of its running episode: an OpenAI-compatible endpoint."""

    @property
    def id(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...


@runtime_checkable
class Environment(Protocol):
    """Makes tasks and scores answers.  Implementations are plain objects, cheap to construct."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``train`` or ``eval``; deterministic for one configuration."""
        ...

    def score(self, task: Task, answer: str) -> float:
        """The reward of a final answer."""
        ...


class ResourceLease(Protocol):
    """A held resource; ``value`` is what the back-end hands out."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> Any: ...


class ResourcePool(Protocol):
    """Leases tools, sandboxes and other resources; every lease ends with its episode."""

    def lease(self, spec: Any, *, name: str = "", owner: str = "") -> AbstractAsyncContextManager[ResourceLease]: ...
    async def release_owner(self, owner: str) -> int:
        """End all leases of an owner (an attempt at an episode); returns how many there were."""
        ...
