"""Ports: the small protocols through which rank-1 packages meet without importing each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    adapter: str = ""
    """Whose weights sample it, in an engine that holds adapters; "": the model's own."""


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
    overflow: bool = False
    """The error: logits are not finite, by these weights or by this prompt."""
    supports: tuple[bytes, ...] = ()
    """One :mod:`wingbeat.core.support` blob per token, or () where every token was drawn from the whole vocabulary."""
    lineage: int | None = None
    """Of ``policy_version``; None: that which the engine's host has now."""


@dataclass(frozen=True, slots=True)
class KvExport:
    """What an engine has computed of a request, for another that goes on with it."""

    tokens: tuple[int, ...]
    """Those that the KV is of: the prompt's and the sampled ones, but for the last."""
    layers: tuple[tuple[Any, Any], ...]
    """Keys and values [heads, tokens, head size] of each layer, all heads of the whole model."""
    policy_version: int
    lineage: int
    model: str
    """Shape and dtype of the model's KV; an engine takes over only what its own model would have computed."""


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
    parallelism: int = 1
    """Processes (devices) that share the model."""


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
    def export_kv(self, request_id: str) -> KvExport | None:
        """What is computed of a running request; None where there is nothing that another engine could use."""
        ...

    def import_kv(self, request: GenerateRequest, export: KvExport) -> int:
        """``submit``, with KV from elsewhere: the tokens that need no computing; 0 where the KV does not fit."""
        ...


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


@runtime_checkable
class PlayedEnvironment(Environment, Protocol):
    """Brings its own agent: what ``agent.path = "builtin"`` runs, with no code of the user's."""

    async def play(self, episode: Any) -> float | Mapping[str, float] | None:
        """Solve the episode's task by asking its policies (a :class:`wingbeat.Episode`); the reward, as an agent's.

        Many episodes run at once on one object.  Whatever a policy says is scored; only what is broken raises.
        """
        ...


class ResourceLease(Protocol):
    """A held resource; ``value`` is what the back-end hands out."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> Any: ...


class ResourcePool(Protocol):
    """Leases tools, sandboxes and other resources; every lease ends with its episode."""

    def lease(
        self, spec: Any, *, name: str = "", owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[ResourceLease]:
        """One for the block; ``wait_s`` bounds the wait for its turn (None: as the pool does)."""
        ...

    def lease_all(
        self, specs: Mapping[str, Any], *, owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Mapping[str, ResourceLease]]:
        """Several for the block, by name: all of them or none."""
        ...

    def prefetch(self, specs: Any, *, owner: str) -> None:
        """Begin to fetch what an owner will lease soon: a spec, or several by name, all of them or none."""
        ...

    async def release_owner(self, owner: str) -> int:
        """End all leases of an owner (an attempt at an episode); returns how many there were."""
        ...

    async def close(self) -> None:
        """End everything, in the event loop in which it was used; twice is harmless."""
        ...


@runtime_checkable
class MeasuredPool(Protocol):
    """A pool that says what it has and did."""

    def snapshot(self) -> Sequence[Any]:
        """One for every class, with the fields of :class:`wingbeat.core.resource_reports.ResourceClass`."""
        ...
