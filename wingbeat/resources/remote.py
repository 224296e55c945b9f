"""Resources of other machines: a pool whose instances live on resources servers (``wingbeat resources``).

pool = RemoteResources("http://tools.example:8322", key)
async with pool, pool.lease(SandboxSpec(), owner=episode.id) as lease: await lease.value.run("make test")

In-process objects stay in this process, all other kinds go to a server.  One that was given several keeps each owner
at one of them.  Whatever breaks on the way is ResourceFailed or ResourceLost, never an observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from wingbeat.resources.pool import WAIT_S, Resources
from wingbeat.resources.remote_pool import RETRY_S, RemoteLease, RemotePool
from wingbeat.resources.remote_servers import Find, Servers
from wingbeat.resources.specs import LocalSpec, Spec
from wingbeat.resources.stats import ClassStats

__all__ = ["RemoteLease", "RemotePool", "RemoteResources"]


class RemoteResources:
    """Resources servers and, for in-process objects, a pool of this process; a pool as any other."""

    def __init__(
        self,
        urls: str | Sequence[str],
        key: str | None = None,
        *,
        local: Resources | None = None,
        find: Find | None = None,
        ca: str | os.PathLike[str] | None = None,
        wait_s: float = WAIT_S,
        retry_budget_s: float = RETRY_S,
    ) -> None:
        """``local``: None makes one with this machine's budgets, closed with this pool; ``find``: asked now and then
        for the addresses of all servers, soon where one does not answer (None: they stay where they are)."""

        def make(url: str) -> RemotePool:
            return RemotePool(url, key, ca=ca, wait_s=wait_s, retry_budget_s=retry_budget_s)

        self._servers = Servers([urls] if isinstance(urls, str) else list(urls), make=make, find=find)
        self.local = Resources(wait_s=wait_s) if local is None else local

    @property
    def pools(self) -> Sequence[RemotePool]:
        """One of each server, now."""
        return self._servers.pools

    async def __aenter__(self) -> Self:
        await self.local.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all leases; twice is harmless."""
        try:
            await self._servers.close()
        finally:
            await self.local.close()

    def lease(
        self, spec: Spec, *, name: str = "", owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """As :meth:`wingbeat.resources.Resources.lease`."""
        if isinstance(spec, LocalSpec):
            return self.local.lease(spec, name=name, owner=owner, wait_s=wait_s)
        return self._there(spec, name, owner, wait_s)

    @asynccontextmanager
    async def _there(self, spec: Spec, name: str, owner: str, wait_s: float | None) -> AsyncGenerator[RemoteLease]:
        await self._servers.look()
        try:
            async with self._servers.of(owner).lease(spec, name=name, owner=owner, wait_s=wait_s) as lease:
                yield lease
        finally:
            self._servers.left(owner)

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
                await self._servers.look()
                stack.callback(self._servers.left, owner)
                pool = self._servers.of(owner)
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
            self._servers.of(owner).prefetch(there, owner=owner)

    async def release_owner(self, owner: str) -> int:
        """As :meth:`wingbeat.resources.Resources.release_owner`."""
        pool = self._servers.forget(owner)
        works = [asyncio.ensure_future(self.local.release_owner(owner))]
        if pool is not None:
            works.append(asyncio.ensure_future(pool.release_owner(owner)))
        await asyncio.wait(works)  # both go on if this is cancelled
        return sum(work.result() for work in works)

    def snapshot(self) -> list[ClassStats]:
        """Of the pool of this process; a resources server tells of its own."""
        return self.local.snapshot()
