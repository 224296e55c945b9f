"""A real resources server on loopback, in this process and event loop, with any back-ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.config.server import ServerConfig
from wingbeat.resources import Instance, ResourceFailed, Resources, Spec
from wingbeat.resources.backends.endpoint import Endpoint
from wingbeat.resources.remote import RemotePool
from wingbeat.server.http.protocol import Bounds, bounded_protocol
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.resources.app import LendingServer


@dataclass
class Lender:
    """A server that serves."""

    lending: LendingServer
    url: str

    @property
    def pool(self) -> Resources:
        return self.lending.pool


@contextlib.asynccontextmanager
async def lender(
    backends: Any = None,
    *,
    keys: KeyRing | None = None,
    server: ServerConfig | None = None,
    port: int = 0,
    **config: Any,
) -> AsyncIterator[Lender]:
    settings = ResourcesConfig(**{"kinds": ["sandbox", "subprocess"], "network": True, "heartbeat_s": 0.5, **config})
    lending = LendingServer(settings, server or ServerConfig(), keys or KeyRing({}, is_open=True), backends=backends)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    http = uvicorn.Server(
        uvicorn.Config(
            lending.app(),
            loop="none",
            http=bounded_protocol(Bounds(1000, 30.0)),
            ws="none",
            access_log=False,
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="on",
        )
    )
    http.config.load()
    http.lifespan = http.config.lifespan_class(http.config)
    await http.startup(sockets=[listener])  # and not its `serve`, which looks around ten times a second only
    try:
        yield Lender(lending, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        await _end(http)


async def _end(http: uvicorn.Server) -> None:
    """As its `shutdown` does it, which sleeps a tenth of a second and waits a whole one for idle connections."""
    for listening in http.servers:
        listening.close()
    for connection in tuple(http.server_state.connections):
        connection.shutdown()
    try:
        async with asyncio.timeout(1):
            while http.server_state.connections or http.server_state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)
    except TimeoutError:
        for task in tuple(http.server_state.tasks):
            task.cancel()
    await http.lifespan.shutdown()


class RemoteInstance:
    """A lease of a remote pool, as an instance."""

    handle: str | None = None

    def __init__(self, stack: contextlib.AsyncExitStack, value: Any, inner: Callable[[], Instance]) -> None:
        self._stack = stack
        self.value = value
        self.inner = inner

    async def reset(self) -> None:
        await self.inner().reset()

    async def check(self) -> None:
        await self.inner().check()
        if not isinstance(self.value, Endpoint):
            await self.value.list(".")

    async def close(self) -> None:
        await self._stack.aclose()


@dataclass
class RemoteBackend:
    """A back-end whose instances live on a server of their own, for the conformance suite."""

    kind: str
    make: Callable[[], Any]
    config: dict[str, Any] = field(default_factory=dict)
    """Of the server, beside its kind."""
    started: list[Instance] = field(default_factory=list)
    _stack: contextlib.AsyncExitStack | None = None
    _remote: RemotePool | None = None

    def check(self, spec: Spec) -> None:
        self.make().check(spec)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> RemoteInstance:
        remote = await self._server()
        stack = contextlib.AsyncExitStack()
        lease = await stack.enter_async_context(remote.lease(spec, owner="conformance"))
        if lease.fault is not None:
            raise ResourceFailed("lost")
        inner = self.started[-1]
        return RemoteInstance(stack, lease.value, lambda: inner)

    async def reap(self, handle: str) -> bool:
        return await self.make().reap(handle)

    async def close(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    async def _server(self) -> RemotePool:
        if self._stack is None:
            self._stack = contextlib.AsyncExitStack()
            inner = Recording(self.kind, self.make(), self.started)
            settings = {"kinds": [self.kind], "cpus": 64, "memory_mb": 64_000, **self.config}
            found = await self._stack.enter_async_context(lender({self.kind: inner}, **settings))
            self._remote = RemotePool(found.url)
            self._stack.push_async_callback(self._remote.close)
        assert self._remote is not None
        return self._remote


class Recording:
    """Another back-end, that notes what it started."""

    meters: Any = None

    def __init__(self, kind: str, inner: Any, started: list[Instance]) -> None:
        self.kind = kind
        self._inner = inner
        self._started = started

    def check(self, spec: Spec) -> None:
        if hasattr(self._inner, "meters"):
            self._inner.meters = self.meters
        self._inner.check(spec)

    async def start(self, spec: Spec, *, started: Callable[[str], None]) -> Instance:
        instance = await self._inner.start(spec, started=started)
        self._started.append(instance)
        return instance

    async def reap(self, handle: str) -> bool:
        return await self._inner.reap(handle)

    async def close(self) -> None:
        await self._inner.close()
