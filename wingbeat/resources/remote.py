"""Resources of other machines: a pool whose instances live on resources servers (``wingbeat resources``).

pool = RemoteResources("http://tools.example:8322", key)
async with pool, pool.lease(SandboxSpec(), owner=episode.id) as lease: await lease.value.run("make test")

In-process objects stay in this process, all other kinds go to a server.  One that was given several keeps each owner
at one of them.  Whatever breaks on the way is ResourceFailed or ResourceLost, never an observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from wingbeat.core.errors import ConfigError, RequestError, WingbeatError
from wingbeat.core.lending_protocol import (
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
from wingbeat.resources.pool import WAIT_S, Resources
from wingbeat.resources.remote_http import Connection, Unreachable
from wingbeat.resources.remote_values import Line, remote_value
from wingbeat.resources.specs import LocalSpec, ResourceLost, ResourceWait, Spec
from wingbeat.resources.stats import ClassStats

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

    @property
    def is_away(self) -> bool:
        """It did not answer of late, so that whoever can should go elsewhere."""
        return time.monotonic() < self._away_until

    @property
    def num_leases(self) -> int:
        return sum(len(holding.leases) for holding in self._holdings.values())

    def lease(
        self, spec: Spec, *, name: str = "", owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[RemoteLease]:
        """As :meth:`wingbeat.resources.Resources.lease`; PermissionDenied for what the server does not lend."""
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
        await asyncio.gather(*self._fetching.get(owner, ()), return_exceptions=True)
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
        until = loop.time() + wait_s + LATE_S
        while True:
            try:
                answer = await self._http.read(LeaseAnswer, "POST", "/leases", order)
            except Unreachable:
                self._away_until = time.monotonic() + AWAY_S
                raise
            self._away_until = 0.0
            self._heartbeat_s = answer.heartbeat_s
            if holding.lost.done():
                raise holding.lost.result()
            if answer.state == "held":
                break
            if loop.time() > until:
                raise ResourceWait(f"the turn did not come within {wait_s:g} s at {self.url}")
        for index, (lease, lent) in enumerate(zip(holding.leases, answer.values, strict=True)):
            line = Line(
                self._http,
                f"/leases/{holding.id}/{index}",
                lost=holding.lost,
                on_lost=holding.lose,
                spawn=self._spawn,
            )
            lease.held = remote_value(lent, line)
        self._beat()

    async def _give_back(self, holding: _Holding, *, is_lost: bool) -> None:
        """The server ends it by itself if this does not arrive."""
        if holding.lost.done():
            return
        query = {"lost": "true"} if is_lost else None
        try:
            path = f"/leases/{holding.id}"
            await self._http.send("DELETE", path, query=query, budget_s=LEAVE_RETRY_S, timeout_s=LEAVE_S)
        except WingbeatError as error:
            logger.info("a lease was not given back, and ends by itself: %s", error.message)

    def prefetch(self, specs: Spec | Mapping[str, Spec], *, owner: str) -> None:
        """As :meth:`wingbeat.resources.Resources.prefetch`; what the server refuses, the lease will tell."""
        if not owner:
            raise ValueError("owner: expected a name, since what is fetched ahead is somebody's; got an empty one")
        items = _items(specs if isinstance(specs, Mapping) else {"": specs})
        if items:
            order = _checked(PrefetchOrder, client_id=self.client_id, owner=owner, specs=items)
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
        fetching = self._fetching.pop(owner, [])
        mine = [holding for holding in self._holdings.values() if holding.owner == owner]
        if not fetching and not mine:
            return 0
        await asyncio.gather(*fetching, return_exceptions=True)
        work = self._spawn(self._release(owner))
        fault = ResourceLost(f"the lease has ended: the resources of {owner!r} were released, its episode is over")
        for holding in mine:
            holding.lose(fault)
        await asyncio.wait([work])
        return sum(len(holding.leases) for holding in mine)

    async def _release(self, owner: str) -> None:
        order = _checked(ReleaseOrder, client_id=self.client_id, owner=owner)
        try:
            await self._http.read(Released, "POST", "/release", order, budget_s=LEAVE_RETRY_S, timeout_s=LEAVE_S)
        except WingbeatError as error:
            logger.info("the resources of %r were not released, and end by themselves: %s", owner, error.message)

    async def status(self) -> LendingStatus:
        """What the server has, and how much of it is in use."""
        return await self._http.read(LendingStatus, "GET", "/status")

    async def close(self) -> None:
        """Give everything back; twice is harmless."""
        fault = ResourceLost("the resource pool is closed; its leases have ended")
        holdings = list(self._holdings.values())
        for holding in holdings:
            self._spawn(self._give_back(holding, is_lost=False))
        await asyncio.sleep(0)  # each has begun, and is not told that it is lost
        for holding in holdings:
            holding.lose(fault)
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait([self._heart])
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=LEAVE_S)
        for task in tuple(self._tasks):
            task.cancel()
        await self._http.close()

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
        heard_at = loop.time()
        while self._holdings or self._fetching:
            held = tuple(holding.id for holding in self._holdings.values() if holding.leases[0].held is not None)
            timeout_s = max(1.0, self._heartbeat_s)
            try:
                answer = await self._http.read(
                    HeartbeatAnswer,
                    "POST",
                    "/heartbeat",
                    Heartbeat(client_id=self.client_id, leases=held),
                    budget_s=0,
                    timeout_s=timeout_s,
                )
            except Unreachable as error:
                if loop.time() - heard_at > SILENT_HEARTBEATS * timeout_s:
                    self._lose(dict.fromkeys(held, error.message))
            except WingbeatError as error:
                logger.warning("a heartbeat was refused: %s", error.message)
            else:
                heard_at = loop.time()
                self._heartbeat_s = answer.heartbeat_s
                self._lose(answer.lost)
            await asyncio.sleep(self._heartbeat_s)

    def _lose(self, reasons: Mapping[str, str]) -> None:
        for lease_id, reason in reasons.items():
            holding = self._holdings.get(lease_id)
            if holding is not None:
                holding.lose(ResourceLost(f"the lease is lost: {reason}"))


class RemoteResources:
    """Resources servers and, for in-process objects, a pool of this process; a pool as any other."""

    def __init__(
        self,
        urls: str | Sequence[str],
        key: str | None = None,
        *,
        local: Resources | None = None,
        ca: str | os.PathLike[str] | None = None,
        wait_s: float = WAIT_S,
        retry_budget_s: float = RETRY_S,
    ) -> None:
        """``local``: None makes one with this machine's budgets, closed with this pool."""
        listed = [urls] if isinstance(urls, str) else list(urls)
        if not listed:
            raise ConfigError("urls: expected the address of a resources server, got none")
        self.pools = [RemotePool(url, key, ca=ca, wait_s=wait_s, retry_budget_s=retry_budget_s) for url in listed]
        self.local = Resources(wait_s=wait_s) if local is None else local
        self._owners: dict[str, RemotePool] = {}
        self._waiting: Counter[RemotePool] = Counter()

    async def __aenter__(self) -> Self:
        await self.local.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all leases; twice is harmless."""
        await asyncio.gather(*(pool.close() for pool in self.pools))
        await self.local.close()

    def lease(
        self, spec: Spec, *, name: str = "", owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """As :meth:`wingbeat.resources.Resources.lease`."""
        pool = self.local if isinstance(spec, LocalSpec) else self._pool_of(owner)
        return pool.lease(spec, name=name, owner=owner, wait_s=wait_s)

    @asynccontextmanager
    async def lease_all(
        self, specs: Mapping[str, Spec], *, owner: str = "", wait_s: float | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """All or none: those of this process first, always, so that two who want the same cannot deadlock."""
        here = {name: spec for name, spec in specs.items() if isinstance(spec, LocalSpec)}
        there = {name: spec for name, spec in specs.items() if name not in here}
        async with contextlib.AsyncExitStack() as stack:
            held: dict[str, Any] = {}
            if here:
                held |= await stack.enter_async_context(self.local.lease_all(here, owner=owner, wait_s=wait_s))
            if there:
                pool = self._pool_of(owner)
                held |= await stack.enter_async_context(pool.lease_all(there, owner=owner, wait_s=wait_s))
            yield {name: held[name] for name in specs}

    def prefetch(self, specs: Spec | Mapping[str, Spec], *, owner: str) -> None:
        """As :meth:`wingbeat.resources.Resources.prefetch`."""
        wanted = specs if isinstance(specs, Mapping) else {"": specs}
        here = {name: spec for name, spec in wanted.items() if isinstance(spec, LocalSpec)}
        there = {name: spec for name, spec in wanted.items() if name not in here}
        if here:
            self.local.prefetch(here, owner=owner)
        if there:
            self._pool_of(owner).prefetch(there, owner=owner)

    async def release_owner(self, owner: str) -> int:
        """As :meth:`wingbeat.resources.Resources.release_owner`."""
        pool = self._owners.pop(owner, None)
        there = 0 if pool is None else await pool.release_owner(owner)
        return there + await self.local.release_owner(owner)

    def snapshot(self) -> list[ClassStats]:
        """Of the pool of this process; a resources server tells of its own."""
        return self.local.snapshot()

    def _pool_of(self, owner: str) -> RemotePool:
        """An owner's server; for a new one, that at which this client holds least, of those that answer."""
        pool = self._owners.get(owner) if owner else None
        if pool is None:
            counts = Counter(self._owners.values())
            pool = min(self.pools, key=lambda pool: (pool.is_away, counts[pool], pool.num_leases))
            if owner:
                self._owners[owner] = pool
        return pool


def _items(specs: Mapping[str, Spec]) -> tuple[SpecItem, ...]:
    """Raises ConfigError for what cannot leave this process."""
    for spec in specs.values():
        if isinstance(spec, LocalSpec):
            raise ConfigError("kind: local objects cannot leave their process; lease them from a pool of its own")
    return tuple(SpecItem(name=name, spec=spec.model_dump(mode="json")) for name, spec in specs.items())


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
