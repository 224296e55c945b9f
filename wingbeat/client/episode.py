"""A running episode as its agent sees it.

    async with swarm.episode(task=task) as episode:
        ...                                  # model calls at episode.base_url with episode.api_key
        await episode.finish(reward)

Leaving the block without ``finish`` aborts the episode: an exception is the client's fault, told with
the end of its traceback; the slot reopens and nothing is trained from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

from wingbeat.client import model_clients
from wingbeat.client.blame import explain_failure, tail
from wingbeat.client.heartbeats import Beat, HeartbeatThread
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.rewards import RewardLike, to_metrics, to_rewards
from wingbeat.client.transport import Call, Transport
from wingbeat.core.errors import ConflictError, EpisodeClosed, NotFoundError, RequestError, WingbeatError
from wingbeat.core.ports import ResourceLease, ResourcePool
from wingbeat.core.protocol import (
    AbortRequest,
    BeginReply,
    EpisodeReply,
    FinishReply,
    FinishRequest,
    TransactionModel,
)
from wingbeat.core.types import OUTCOME_OF, Cause, Group, Outcome, Split, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger("wingbeat.client")

_ABORT_RETRY = RetryPolicy(budget_s=5.0)
"""An abort that does not arrive is only a slower reopening of the slot: heartbeats have stopped."""


class EpisodeState(Enum):
    """What this client knows of its episode."""

    OPEN = "open"
    LOST = "lost"
    """The server gave it up; a finish may still count until a successor attempt begins."""
    FINISHED = "finished"
    ABORTED = "aborted"


_TRANSITIONS: Mapping[EpisodeState, frozenset[EpisodeState]] = MappingProxyType(
    {
        EpisodeState.OPEN: frozenset({EpisodeState.LOST, EpisodeState.FINISHED, EpisodeState.ABORTED}),
        EpisodeState.LOST: frozenset({EpisodeState.FINISHED, EpisodeState.ABORTED}),
        EpisodeState.FINISHED: frozenset({EpisodeState.FINISHED}),
        EpisodeState.ABORTED: frozenset({EpisodeState.ABORTED}),
    }
)


class Episode:
    """One attempt at one task.  Made by ``swarm.episode(...)``; of one event loop."""

    def __init__(
        self,
        reply: BeginReply,
        *,
        transport: Transport,
        heartbeats: HeartbeatThread,
        finish_retry: RetryPolicy,
        resources: ResourcePool | None = None,
    ) -> None:
        self._reply = reply
        self._transport = transport
        self._heartbeats = heartbeats
        self._finish_retry = finish_retry
        self._resources = resources
        self._releasing: asyncio.Task[None] | None = None
        self._state = EpisodeState.OPEN
        self.is_part = False
        """Of a team's episode, which alone may finish it."""
        self.task = Task(reply.task.source, reply.task.id, reply.task.payload)
        self.group = Group(reply.group.id, reply.group.size)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._ended = asyncio.Event()
        heartbeats.add(Beat(reply.episode_id, reply.api_key, reply.heartbeat_s, self._on_closed_by_server))

    @property
    def id(self) -> str:
        return self._reply.episode_id

    @property
    def attempt(self) -> int:
        return self._reply.attempt

    @property
    def split(self) -> Split:
        return self._reply.split

    @property
    def base_url(self) -> str:
        """Where model calls go: an OpenAI-compatible endpoint that ends in ``/v1``."""
        return self._reply.base_url

    @property
    def anthropic_base_url(self) -> str:
        """The same place as the ``anthropic`` SDK wants it: without the ``/v1`` that it appends itself."""
        return self._reply.base_url.removesuffix("/v1")

    @property
    def api_key(self) -> str:
        """Valid for this episode only."""
        return self._reply.api_key

    def openai(self, **options: Any) -> AsyncOpenAI:
        """An official client of this episode whose retries bridge a restart of the server; close it, or use it as
        a context manager.

        ``options`` are its constructor's.  Raises DependencyMissing.
        """
        return model_clients.async_openai(self.base_url, self.api_key, options)

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(self._reply.policies)

    @property
    def model(self) -> str:
        """The first policy that trains (the first of all where none does): what ``model`` is in a model call."""
        return self.model_for()

    def model_for(self, policy: str | None = None, *, agent: str = "") -> str:
        """The ``model`` of a policy's calls; ``agent`` gives each member of a team its own baseline.

        Raises RequestError if the episode has no such policy.
        """
        names = [name.partition("@")[0] for name in self._reply.policies]
        if policy is None:
            policy = names[0] if names else ""
        if policy not in names:
            raise RequestError(f"expected one of the episode's policies {names}, got {policy!r}", param="policy")
        return f"{policy}:{agent}" if agent else policy

    @property
    def state(self) -> EpisodeState:
        return self._state

    @property
    def closed(self) -> bool:
        """Finished or aborted by this client."""
        return self._state in (EpisodeState.FINISHED, EpisodeState.ABORTED)

    async def wait_closed(self) -> EpisodeState:
        """Wait until the episode is no longer open: long work can be dropped once the server gave it up."""
        await self._ended.wait()
        return self._state

    def lease(
        self, spec: Any, *, name: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[ResourceLease]:
        """Hold a resource (a tool, a sandbox) for a block: ``async with episode.lease(spec) as r: r.value ...``

        It ends with its block or with the episode, whichever comes first.  The same ``name`` again, while it is held,
        is the same resource.  ``wait_s`` bounds the wait for its turn (None: as the pool does).  Raises RequestError
        where the swarm has no resource pool, EpisodeClosed once the episode is over.
        """
        return self._pool().lease(spec, name=name, owner=self._owner, wait_s=wait_s)

    def lease_all(
        self, specs: Mapping[str, Any], *, wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Mapping[str, ResourceLease]]:
        """Hold several for a block, by name: all of them or none, so that two episodes that want the same ones never
        wait for each other.  Raises as :meth:`lease`."""
        return self._pool().lease_all(specs, owner=self._owner, wait_s=wait_s)

    def prefetch(self, specs: Any) -> None:
        """Begin to start what this episode will lease soon (a spec, or several by name), and return at once.

        A lease of an equal spec takes it over; what is never leased ends with the episode.  ``@agent(resources=...)``
        does it as the episode begins.  Raises as :meth:`lease`, and for a spec that could never be had.
        """
        self._pool().prefetch(specs, owner=self._owner)

    def _pool(self) -> ResourcePool:
        if self._resources is None:
            raise RequestError("this swarm has no resource pool: AsyncSwarm(url, resources=Resources())")
        if self._state is not EpisodeState.OPEN:
            raise EpisodeClosed(f"episode {self.id} is {self._state.value}; it takes no more resources")
        return self._resources

    async def finish(
        self,
        reward: RewardLike,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        outcome: Outcome = Outcome.AGENT,
        message: str = "",
    ) -> FinishReply:
        """Report the reward; returns once the server has it on disk.

        Sent again until it is acknowledged, also across a restart of the server (the same body twice
        counts once).  Raises InvalidReward for what is not a finite number, EpisodeClosed if it comes
        too late, IdempotencyConflict after another reward, RequestError for a part of a team's episode.
        """
        if self.is_part:
            raise RequestError(
                f"episode {self.id} is one server's part of a team's episode: finish that one, with a reward for each"
                " server, so that all count it or none does"
            )
        return await self.finish_alone(reward, metrics=metrics, outcome=outcome, message=message)

    async def finish_alone(
        self, reward: RewardLike, *, metrics: Mapping[str, SupportsFloat] | None, outcome: Outcome, message: str
    ) -> FinishReply:
        """As :meth:`finish`, also for a part of a team's episode that trains nothing."""
        if self._state is EpisodeState.ABORTED:
            raise EpisodeClosed(f"episode {self.id} was aborted by this client; it cannot finish any more")
        body = FinishRequest(
            outcome=outcome, rewards=to_rewards(reward), metrics=to_metrics(metrics), message=tail(message)
        )
        call = self._call("finish", body, self._finish_retry)
        reply = await self._transport.send(call, FinishReply)
        if reply.warning:
            logger.warning("episode %s: %s", self.id, reply.warning)
        self._move(EpisodeState.FINISHED)
        await self._released()
        return reply

    async def abort(self, message: str = "", *, outcome: Outcome = Outcome.CLIENT, cause: Cause | None = None) -> None:
        """End the episode without a reward; its slot reopens.  Harmless if it is already over.

        ``cause`` is one of ``outcome`` that a client can know (``REPORTABLE``), or left to the server.
        """
        if self.closed:
            return
        self._move(EpisodeState.ABORTED)
        body = AbortRequest(outcome=outcome, cause=cause, message=tail(message))
        try:
            await self._transport.send_unread(self._call("abort", body, _ABORT_RETRY))
        except (ConflictError, NotFoundError) as error:
            logger.debug("abort of %s: %s", self.id, error.message)
        finally:
            await self._released()

    async def confirm(self) -> None:
        """Make an attempt that began on trial (``tentative_s``) an ordinary one; only then it takes model calls."""
        call = Call("POST", f"/api/episodes/{self.id}/confirm", key=self.api_key, retry=_ABORT_RETRY)
        await self._transport.send_unread(call)

    async def prepare(
        self,
        reward: RewardLike,
        *,
        transaction: TransactionModel,
        metrics: Mapping[str, SupportsFloat] | None = None,
        message: str = "",
        budget_s: float | None = None,
    ) -> FinishReply:
        """Report the reward as one server of several: durable, but it counts once the transaction is committed.

        Once it is, tell the episode with :meth:`conclude`; else abort it.  Raises as :meth:`finish`, UnavailableError
        after ``budget_s``.
        """
        body = FinishRequest(
            rewards=to_rewards(reward), metrics=to_metrics(metrics), message=tail(message), transaction=transaction
        )
        return await self._transport.send(self._call("finish", body, RetryPolicy(budget_s=budget_s)), FinishReply)

    async def conclude(self) -> None:
        """Its transaction is committed: it has finished."""
        self._move(EpisodeState.FINISHED)
        await self._released()

    async def status(self) -> EpisodeReply:
        """What the server knows of this episode."""
        return await self._transport.send(Call("GET", f"/api/episodes/{self.id}", key=self.api_key), EpisodeReply)

    def _call(self, verb: str, body: FinishRequest | AbortRequest, retry: RetryPolicy) -> Call:
        return Call("POST", f"/api/episodes/{self.id}/{verb}", body=body, key=self.api_key, retry=retry)

    def _move(self, state: EpisodeState) -> None:
        """Apply one transition of the table; the episode needs heartbeats only while it is open."""
        if state not in _TRANSITIONS[self._state]:
            raise EpisodeClosed(f"episode {self.id} is {self._state.value}; it cannot become {state.value}")
        self._state = state
        self._ended.set()
        self._heartbeats.remove(self.api_key)
        if self._resources is not None and self._releasing is None:
            self._releasing = asyncio.get_running_loop().create_task(self._release(self._resources))

    async def _release(self, resources: ResourcePool) -> None:
        await resources.release_owner(self._owner)

    async def _released(self) -> None:
        """Wait until the episode's resources are given back; that goes on if the caller is cancelled."""
        if self._releasing is not None:
            await asyncio.shield(self._releasing)

    @property
    def _owner(self) -> str:
        """Of its resources: this client may work at another attempt of the same episode at the same time."""
        return f"{self.id} attempt {self.attempt}"

    def _on_closed_by_server(self, reason: str) -> None:
        """Told in the heartbeat thread; the state belongs to the loop."""
        with contextlib.suppress(RuntimeError):  # the loop ended first: nobody is left to be told
            self._loop.call_soon_threadsafe(self._lose, reason)

    def _lose(self, reason: str) -> None:
        if self._state is EpisodeState.OPEN:
            logger.warning("the server gave up episode %s: %s", self.id, reason)
            self._move(EpisodeState.LOST)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.closed or os.getpid() != self._pid:  # a forked child does not end its parent's episode
            return
        cause, message = explain_failure(error, server=self.base_url)
        try:
            await self.abort(message, outcome=OUTCOME_OF[cause], cause=cause)
        except WingbeatError as failure:  # must not hide the agent's own exception
            logger.warning("episode %s could not be aborted (the server will notice): %s", self.id, failure.message)
