"""One resources server, as a pool: its leases, their life by heartbeats, and giving all of it back."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from wingbeat.core.errors import ConfigError, RequestError, WingbeatError
from wingbeat.core.lending_protocol import (
    MAX_BEAT,
    SILENT_HEARTBEATS,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseOrder,
    LendingStatus,
    PrefetchOrder,
    Released,
    ReleaseOrder,
    SpecItem,
)
from wingbeat.core.protocol import Wire
from wingbeat.resources.pool import WAIT_S
from wingbeat.resources.remote_http import Connection, Unreachable
from wingbeat.resources.remote_values import Line, remote_value, unless_lost
from wingbeat.resources.specs import LocalSpec, ResourceFailed, ResourceLost, ResourceWait, Spec

logger = logging.getLogger("wingbeat.resources")

W = TypeVar("W", bound=Wire)

RETRY_S = 10.0
"""How long a server may be away: what it held is lost with it anyway."""
LATE_S = 60.0
"""Beyond ``wait_s``, what a server may take to say that it is over."""
AWAY_S = 30.0
"""For so long, owners that come anew get another server than one that did not answer."""
LEAVE_S = 30.0
"""For giving back: it cleans first."""
LEAVE_RETRY_S = 2.0
"""A server that is away then has lost what is given back, or will miss its client."""


class RemoteLease:
    """A resource that a server holds for this client."""

    def __init__(self, spec: Spec, *, name: str, owner: str) -> None:
        self.spec = spec
        self.name = name
        self.owner = owner
        self.ended = False
        self.fault: ResourceLost | None = None
        self.held: Any = None

    @property
    def value(self) -> Any:
        """A box or an endpoint.  Raises ResourceLost once the lease ended."""
        if self.fault is not None:
            raise self.fault.with_traceback(None)
        if self.ended:
            raise ResourceLost(f"the lease {self.name!r} of {self.owner!r} has ended; take a new one")
        return self.held


class _Holding:
    """What was asked for together."""

    def __init__(self, leases: Sequence[RemoteLease], owner: str) -> None:
        self.id = uuid.uuid4().hex
        self.leases = leases
        self.owner = owner
        self.lost: asyncio.Future[ResourceLost] = asyncio.get_running_loop().create_future()

    @property
    def is_held(self) -> bool:
        """It came, and is not lost."""
        return self.leases[0].held is not None and not self.lost.done()

    def lose(self, fault: ResourceLost) -> None:
        if not self.lost.done():
            self.lost.set_result(fault)
        for lease in self.leases:
            lease.fault = lease.fault or fault


class RemotePool:
    """One resources server; implements :class:`wingbeat.core.ports.ResourcePool`.  Of one event loop."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        ca: str | os.PathLike[str] | None = None,
        wait_s: float = WAIT_S,
        retry_budget_s: float = RETRY_S,
    ) -> None:
        self.client_id = f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.url = url.rstrip("/")
        self._http = Connection(url, key=key, client_id=self.client_id, retry_budget_s=retry_budget_s, ca=ca)
        self._wait_s = wait_s
        self._holdings: dict[str, _Holding] = {}
        self._fetching: dict[str, list[asyncio.Task[None]]] = {}
        """By owner, until it is released."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._heart: asyncio.Task[None] | None = None
        self._heartbeat_s = 5.0
        self._away_until = 0.0
        self._closed = False

    @property
    def is_away(self) -> bool:
        """It did not answer of late, so that whoever can should go elsewhere."""
        return time.monotonic() < self._away_until

    def holds(self, owner: str) -> bool:
        """Or waits for."""
        return any(holding.owner == owner for holding in self._holdings.values())

    def has_fetched(self, owner: str) -> bool:
        """Ahead, since it was last released."""
        return owner in self._fetching

    @property
    def num_fetching(self) -> int:
        """Owners that fetched something ahead and were not released yet."""
        return len(self._fetching)

    @property
    def num_leases(self) -> int:
        return sum(len(holding.leases) for holding in self._holdings.values())

    def lease(
        self, spec: Spec, *, name: str = "", owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[RemoteLease]:
        """As :meth:`wingbeat.resources.Resources.lease`; PermissionDenied for what the server does not lend."""
        _check_specs([spec])
        return self._one(spec, name, owner, wait_s)

    @asynccontextmanager
    async def _one(self, spec: Spec, name: str, owner: str, wait_s: float | None) -> AsyncGenerator[RemoteLease]:
        async with self.lease_all({name: spec}, owner=owner, wait_s=wait_s) as leases:
            yield leases[name]

    @asynccontextmanager
    async def lease_all(
        self, specs: Mapping[str, Spec], *, owner: str = "", wait_s: float | None = None
    ) -> AsyncGenerator[dict[str, RemoteLease]]:
        """As :meth:`wingbeat.resources.Resources.lease_all`."""
        if not specs:
            yield {}
            return
        items = _items(specs)
        self._check_open()
        fetching = self._fetching.get(owner)
        if fetching:  # each is to be taken over; they go on if this is cancelled
            await asyncio.wait(fetching)
        holding = _Holding([RemoteLease(spec, name=name, owner=owner) for name, spec in specs.items()], owner)
        self._holdings[holding.id] = holding
        is_lost = False
        try:
            await self._acquire(holding, items, self._wait_s if wait_s is None else wait_s)
            yield {lease.name: lease for lease in holding.leases}
        except ResourceLost:
            is_lost = True
            raise
        finally:
            del self._holdings[holding.id]
            for lease in holding.leases:
                lease.ended, lease.held = True, None
            leaving = self._spawn(self._give_back(holding, is_lost=is_lost))
            await asyncio.wait([leaving])  # it goes on if this is cancelled

    async def _acquire(self, holding: _Holding, items: tuple[SpecItem, ...], wait_s: float) -> None:
        """Wait for it.  Raises what the server's pool raises."""
        order = _checked(
            LeaseOrder,
            client_id=self.client_id,
            idempotency_key=holding.id,
            owner=holding.owner,
            specs=items,
            wait_s=wait_s,
        )
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s + max(_start_s(lease.spec) for lease in holding.leases) + LATE_S
        while True:
            try:
                answer = await unless_lost(holding.lost, self._http.read(LeaseAnswer, "POST", "/leases", order))
            except Unreachable:
                self._away_until = time.monotonic() + AWAY_S
                raise
            self._away_until = 0.0
            self._heartbeat_s = answer.heartbeat_s
            if answer.state == "held":
                break
            if loop.time() > until:
                raise ResourceWait(f"{self.url} did not say within {wait_s + LATE_S:g} s that the turn did not come")
        for index, (lease, lent) in enumerate(zip(holding.leases, answer.values, strict=True)):
            line = Line(
                self._http,
                f"/leases/{holding.id}/{index}",
                lost=holding.lost,
                on_lost=holding.lose,
                spawn=self._spawn,
            )
            lease.held = remote_value(lent, line, lease.spec)
        self._beat()

    async def _give_back(self, holding: _Holding, *, is_lost: bool) -> None:
        """The server ends it by itself if this does not arrive."""
        if holding.lost.done():
            return
        query = {"lost": "true"} if is_lost else None
        try:
            path = f"/leases/{holding.id}"
            await self._http.send("DELETE", path, query=query, budget_s=self._leave_retry_s, timeout_s=self._leave_s)
        except WingbeatError as error:
            logger.info("a lease, if it was granted, was not given back, and ends by itself: %s", error.message)

    def prefetch(self, specs: Spec | Mapping[str, Spec], *, owner: str) -> None:
        """As :meth:`wingbeat.resources.Resources.prefetch`; what the server refuses, the lease will tell."""
        if not owner:
            raise ValueError("owner: expected a name, since what is fetched ahead is somebody's; got an empty one")
        self._check_open()
        items = _items(specs if isinstance(specs, Mapping) else {"": specs})
        if items:
            call_id = uuid.uuid4().hex
            order = _checked(PrefetchOrder, client_id=self.client_id, call_id=call_id, owner=owner, specs=items)
            self._fetching.setdefault(owner, []).append(self._spawn(self._fetch(order)))
            self._beat()

    async def _fetch(self, order: PrefetchOrder) -> None:
        try:
            await self._http.send("POST", "/prefetch", order)
        except WingbeatError as error:
            logger.info("nothing was fetched ahead: %s", error.message)

    async def release_owner(self, owner: str) -> int:
        """As :meth:`wingbeat.resources.Resources.release_owner`."""
        if not owner:
            raise ValueError("owner: expected a name, got an empty one, which is shared by all unowned leases")
        work, num_held = self._begin_release(owner)
        if work is not None:
            await asyncio.wait([work])  # it goes on if this is cancelled
        return num_held

    def abandon(self, owner: str) -> None:
        """Its owner goes to another server; what it has or fetched ahead here is released."""
        self._begin_release(owner)

    def _begin_release(self, owner: str) -> tuple[asyncio.Task[Any] | None, int]:
        """What releases it, and how many leases it held."""
        fetching = self._fetching.pop(owner, [])
        mine = [holding for holding in self._holdings.values() if holding.owner == owner]
        if not fetching and not mine:
            return None, 0
        num_held = sum(len(holding.leases) for holding in mine if holding.is_held)
        fault = ResourceLost(f"the lease has ended: the resources of {owner!r} were released, its episode is over")
        for holding in mine:
            holding.lose(fault)
        return self._spawn(self._release(owner, fetching)), num_held

    async def _release(self, owner: str, fetching: Sequence[asyncio.Task[None]]) -> None:
        if fetching:  # else one could come after it
            await asyncio.wait(fetching)
        order = _checked(ReleaseOrder, client_id=self.client_id, owner=owner)
        try:
            await self._http.read(
                Released, "POST", "/release", order, budget_s=self._leave_retry_s, timeout_s=self._leave_s
            )
        except WingbeatError as error:
            logger.info("the resources of %r were not released, and end by themselves: %s", owner, error.message)

    async def status(self) -> LendingStatus:
        """What the server has, and how much of it is in use."""
        return await self._http.read(LendingStatus, "GET", "/status")

    async def close(self) -> None:
        """Give everything back; twice is harmless."""
        self._closed = True
        fault = ResourceLost("the resource pool is closed; its leases have ended")
        holdings = list(self._holdings.values())
        for holding in holdings:
            self._spawn(self._give_back(holding, is_lost=False))
        for owner, fetching in self._fetching.items():
            self._spawn(self._release(owner, fetching))
        self._fetching.clear()
        await asyncio.sleep(0)  # each has begun, and is not told that it is lost
        for holding in holdings:
            holding.lose(fault)
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait([self._heart])
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=LEAVE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self._http.close()

    @property
    def _leave_retry_s(self) -> float:
        """For giving back; where nobody answers one try is enough, since what was there is lost with it."""
        return 0.0 if self.is_away else LEAVE_RETRY_S

    @property
    def _leave_s(self) -> float:
        return LEAVE_RETRY_S if self.is_away else LEAVE_S

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceFailed("the resource pool is closed; no further leases")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of the pool's own, whose failures are told in its log only."""
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- life

    def _beat(self) -> None:
        if self._heart is None or self._heart.done():
            self._heart = asyncio.get_running_loop().create_task(self._live(), name="resource-heartbeats")

    async def _live(self) -> None:
        """Say that this client lives, as long as it has something there."""
        loop = asyncio.get_running_loop()
        heard_at, refusal = loop.time(), ""
        while self._holdings or self._fetching:
            held = [holding.id for holding in self._holdings.values() if holding.is_held]
            timeout_s = max(1.0, self._heartbeat_s)
            try:
                for start in range(0, len(held) or 1, MAX_BEAT):
                    await self._beat_once(held[start : start + MAX_BEAT], timeout_s=timeout_s)
            except WingbeatError as error:
                if isinstance(error, Unreachable):
                    self._away_until = time.monotonic() + AWAY_S
                elif error.message != refusal:  # once
                    logger.warning("a heartbeat was refused: %s", error.message)
                refusal = error.message
                if loop.time() - heard_at > SILENT_HEARTBEATS * timeout_s:
                    self._lose(dict.fromkeys(held, error.message))
            else:
                heard_at, refusal = loop.time(), ""
                self._away_until = 0.0
            await asyncio.sleep(self._heartbeat_s)

    async def _beat_once(self, held: Sequence[str], *, timeout_s: float) -> None:
        """Raises WingbeatError."""
        beat = Heartbeat(client_id=self.client_id, leases=tuple(held))
        answer = await self._http.read(
            HeartbeatAnswer, "POST", "/heartbeat", beat, budget_s=self._heartbeat_s / 2, timeout_s=timeout_s
        )
        self._heartbeat_s = answer.heartbeat_s
        self._lose(answer.lost)

    def _lose(self, reasons: Mapping[str, str]) -> None:
        for lease_id, reason in reasons.items():
            holding = self._holdings.get(lease_id)
            if holding is not None:
                holding.lose(ResourceLost(f"the lease is lost: {reason}"))


def _start_s(spec: Spec) -> float:
    """What a server may take from the turn on: one that it has may be unfit, and another is started."""
    return spec.start_timeout_s + spec.reset_timeout_s + spec.close_timeout_s


def _items(specs: Mapping[str, Spec]) -> tuple[SpecItem, ...]:
    """Raises ConfigError for what is no spec, or cannot leave this process; RequestError for too long a name."""
    _check_specs(specs.values())
    return tuple(_checked(SpecItem, name=name, spec=spec.model_dump(mode="json")) for name, spec in specs.items())


def _check_specs(specs: Iterable[Any]) -> None:
    for spec in specs:
        if not isinstance(spec, Spec):
            raise ConfigError(f"expected a spec, got {type(spec).__name__}; parse_spec(data) makes one of plain data")
        if isinstance(spec, LocalSpec):
            raise ConfigError("kind: local objects cannot leave their process; lease them from a pool of its own")


def _checked(model: type[W], **fields: Any) -> W:
    """Raises RequestError for what no server takes: too many specs at once, a name that is too long."""
    try:
        return model(**fields)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise RequestError(f"`{where}`: {fault['msg']}", param=where) from None


async def _quietly(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except (WingbeatError, OSError) as error:
        logger.debug("%s", error)
        return None
