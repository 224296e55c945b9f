"""A policy of a Wingbeat server as a resource: a judge, a user simulator, an opponent.

A lease is an episode of split ``eval`` on that server, begun at the start and finished at the end: nothing of it
trains, it is part of no evaluation (so its reward, 0, means nothing), sampling is as the caller asks, and its calls
stand in the server's own queues.  An episode that the server ended meanwhile (nobody called for
``server.idle_timeout_s``) is followed by another one, unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError

from wingbeat.core.errors import AuthenticationError, EpisodeClosed
from wingbeat.core.negotiation import write_range
from wingbeat.core.ports import Clock
from wingbeat.core.protocol import PROTOCOL_HEADER, BeginReply, BeginRequest, FinishRequest, TaskModel
from wingbeat.core.types import Split
from wingbeat.resources.backends.breaker import Breaker
from wingbeat.resources.backends.endpoint import Endpoint, check_budget, key_of
from wingbeat.resources.backends.endpoint_calls import Answer, Caller, Patience, error_code
from wingbeat.resources.backends.endpoint_http import HttpClient, Message, message
from wingbeat.resources.backends.endpoint_urls import Choice, Target
from wingbeat.resources.backends.endpoint_usage import Meters, Prices, Purse
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Reuse, Spec, UnsupportedField
from wingbeat.resources.specs_remote import ModelSpec

logger = logging.getLogger("wingbeat.resources")

TASK_SOURCE = "resource"
"""Of the episodes that leases are, where people look at them."""
BEGIN_S = 60.0
"""Longer than a server lets a begin wait."""
FINISH_BUDGET_S = 5.0
"""An episode that cannot be finished ends by itself once nobody calls."""
OVER = frozenset({EpisodeClosed.code, AuthenticationError.code})
"""What a call is told whose episode the server has ended."""
MAX_PAST = 8
"""Episodes whose connections are kept for the calls still under way in them; a lease may be held for weeks."""
BREAKER_FAILURES = 5
BREAKER_S = 5.0
HEADERS = {PROTOCOL_HEADER: write_range()}


@dataclass(frozen=True, slots=True)
class _Visit:
    """One episode, and the connections of its calls."""

    episode_id: str
    calls: Caller
    episode: Caller
    """With the episode's key, to finish it."""

    async def close(self) -> None:
        await self.calls.close()
        await self.episode.close()


class ModelInstance:
    """A leased policy (``wingbeat.resources.backend.Instance``).

    It has no handle: an episode whose client died is ended by the server.
    """

    handle: str | None = None

    def __init__(self, spec: ModelSpec, *, key: str, purse: Purse, clock: Clock, rng: random.Random) -> None:
        self._spec = spec
        self._purse = purse
        self._clock = clock
        self._rng = rng
        self._server = self._caller(_root(spec), key, timeout_s=BEGIN_S, purse=_nobody_s_purse())
        self._lock = asyncio.Lock()
        self._visit: _Visit | None = None
        self._past: list[_Visit] = []
        """Episodes that the server ended."""
        self._closed = False
        self.value = Endpoint(self.send, model=spec.policy)

    @property
    def cost(self) -> float:
        return self._purse.cost

    async def begin(self) -> None:
        """Begin an episode.  Raises ResourceFailed; cancelled, it may leave one that ends by itself."""
        spec = self._spec
        name = spec.policy if spec.version is None else f"{spec.policy}@{spec.version}"
        request = BeginRequest(
            idempotency_key=uuid.uuid4().hex,
            task=TaskModel(source=TASK_SOURCE, id=spec.label or spec.policy),
            split=Split.EVAL,
            policies=[name],
            label=spec.label,
        )
        answer = await self._server.send(_post("/api/episodes", request), repeatable=True)
        begun = _begun(answer, name)
        calls = self._caller(f"{_root(spec)}/v1", begun.api_key, timeout_s=spec.request_timeout_s, purse=self._purse)
        own = self._caller(_root(spec), begun.api_key, timeout_s=FINISH_BUDGET_S, purse=_nobody_s_purse())
        self._visit = _Visit(begun.episode_id, calls, own)

    async def send(self, message: Message, *, content: Any = None, repeatable: bool | None = None) -> Answer:
        """As :meth:`Caller.send`, in the episode of this lease or in its successor."""
        visit = await self._current()
        answer = await visit.calls.send(message, content=content, repeatable=repeatable)
        if answer.reply.ok or error_code(answer.content) not in OVER:
            return answer
        logger.info("episode %s is over on the server; another one begins", visit.episode_id)
        visit = await self._current(after=visit)
        return await visit.calls.send(message, content=content, repeatable=repeatable)

    async def reset(self) -> None:
        """Another episode."""
        async with self._lock:
            await self._finish()
            await self.begin()

    async def check(self) -> None:
        if self._closed:
            raise ResourceLost(f"the lease of policy {self._spec.policy!r} is closed")

    async def close(self) -> None:
        self._closed = True
        await self._server.close()  # first: one that begins an episode now would hold the lock for as long as it tries
        async with self._lock:
            await self._finish()

    async def _current(self, *, after: _Visit | None = None) -> _Visit:
        """The episode of now; another one than ``after``."""
        async with self._lock:
            await self.check()
            if self._visit is None or self._visit is after:
                if self._visit is not None:  # calls may still be under way in it, each to hear for itself
                    self._past.append(self._visit)
                    self._visit = None
                    while len(self._past) > MAX_PAST:
                        await self._past.pop(0).close()
                await self.begin()
            assert self._visit is not None
            return self._visit

    async def _finish(self) -> None:
        past, self._past = self._past, []
        for ended in past:
            await ended.close()
        visit, self._visit = self._visit, None
        if visit is None:
            return
        path = f"/api/episodes/{visit.episode_id}/finish"
        fault = ""
        try:
            async with asyncio.timeout(FINISH_BUDGET_S):
                answer = await visit.episode.send(_post(path, FinishRequest(rewards=0.0)), repeatable=True)
            if not answer.reply.ok and error_code(answer.content) not in OVER:
                fault = answer.words
        except (ResourceFailed, TimeoutError) as error:
            fault = str(error) or "no answer in time"
        finally:
            await visit.close()
        if fault:
            logger.warning("episode %s was not finished, and ends by itself: %s", visit.episode_id, fault)

    def _caller(self, url: str, key: str, *, timeout_s: float, purse: Purse) -> Caller:
        spec = self._spec
        breaker = Breaker(max_failures=BREAKER_FAILURES, cool_s=BREAKER_S, clock=self._clock)
        choice = Choice([Target(url, breaker)], max_concurrent=spec.max_concurrent, clock=self._clock)
        patience = Patience(spec.queue_s, spec.retry_budget_s, self._clock, self._rng)
        http = HttpClient(key=key, timeout_s=timeout_s, tls=url.startswith("https"))
        return Caller(http, choice, purse, patience)


class ModelBackend:
    """Leases policies of Wingbeat servers (``wingbeat.resources.backend.Backend``)."""

    kind: ClassVar[str] = "model"

    def __init__(self, *, clock: Clock = time.monotonic, rng: random.Random | None = None) -> None:
        self.meters: Meters | None = None
        """The pool's, which sets them."""
        self._clock = clock
        self._rng = rng or random.Random()

    def check(self, spec: Spec) -> None:
        assert isinstance(spec, ModelSpec)
        if spec.reuse is Reuse.SHARED:
            raise UnsupportedField(
                self.kind,
                "reuse",
                "a lease is one episode on the server, which keeps all its calls: never or after_reset",
            )
        if spec.needs is not None and spec.needs.gpus:
            raise UnsupportedField(self.kind, "needs.gpus", "its devices are the server's: leave it out")
        key_of(spec.key_env, field="key_env")
        check_budget(self.meters, self.kind, spec.budget)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> ModelInstance:
        assert isinstance(spec, ModelSpec)
        key = key_of(spec.key_env, field="key_env")
        purse = Purse(Prices(), limiter=None, meters=self.meters, budget=spec.budget)
        instance = ModelInstance(spec, key=key, purse=purse, clock=self._clock, rng=self._rng)
        try:
            await instance.begin()
        except BaseException:
            await instance.close()
            raise
        return instance

    async def reap(self, handle: str) -> bool:
        """The server ends what nobody calls any more."""
        return False

    async def close(self) -> None:
        """Instances share nothing."""


def _root(spec: ModelSpec) -> str:
    return spec.url.rstrip("/").removesuffix("/v1")


def _nobody_s_purse() -> Purse:
    return Purse(Prices(), limiter=None, meters=None, budget="")


def _post(path: str, body: BaseModel) -> Message:
    return message("POST", path, json=body.model_dump(mode="json"), headers=HEADERS)


def _begun(answer: Answer, name: str) -> BeginReply:
    if not answer.reply.ok:
        raise ResourceFailed(
            f"no episode with policy {name!r}: {answer.words}; a version must be held by a running evaluation, and a"
            " policy with snapshot_of is what stays as it was"
        )
    try:
        return BeginReply.model_validate_json(answer.reply.body, extra="ignore")
    except ValidationError:
        # not its words: what almost is a begun episode has the episode's key in it
        raise ResourceFailed(
            f"expected a Wingbeat server, got HTTP {answer.reply.status} from {answer.reply.url} and no episode in it"
        ) from None
