"""One connection to one MCP server, owned by a task of its own.

The package's contexts must be left in the task that entered them, while tools are called, and a lost server is given
up, from any. What the server writes to its standard error is read all the time, so that it never blocks on it, and its
end is kept.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from wingbeat.resources import ResourceFailed

if TYPE_CHECKING:
    from mcp import Client

MIN_PROBE_S, MAX_PROBE_S = 1.0, 10.0
"""For an answer of a server that may be gone; between them, as long as a call may take."""
MAX_STDERR_BYTES = 8192
MAX_STDERR_LINES = 10
"""Told in an error."""
PLAIN_OPTIONS = frozenset({"-m", "-u", "-y"})
OPTION = re.compile(r"-|\w+=")
URL = re.compile(r"(https?://)(?:[^\s'\"/?#]*@)?([^\s'\"/?#]+)[^\s'\"]*")
LAST_WORDS_S = 1.0
"""For the rest of what a dead server wrote."""
GOODBYE_S = 5.0
"""For a server behind a url to end its session; the package bounds the end of one that was started."""


@dataclass(frozen=True, slots=True)
class McpTarget:
    """A server: how it is started, or where it is."""

    command: tuple[str, ...]
    url: str
    env: Mapping[str, str] = field(repr=False)
    cwd: str
    headers: Mapping[str, str] = field(repr=False)

    @property
    def title(self) -> str:
        """For messages, without what may be a key: what follows the host of a url, options and assignments."""
        if self.url:
            return f"the MCP server {bare(self.url)}"
        words = list(takewhile(lambda word: word in PLAIN_OPTIONS or not OPTION.match(word), self.command))
        return f"the MCP server {' '.join(words)}{' ...' if len(words) < len(self.command) else ''}"


def bare(text: str) -> str:
    """A text whose urls end with their host: keys stand in paths as well as in queries."""
    return URL.sub(r"\1\2", text)


class Link:
    """An open connection; made by :meth:`open`."""

    def __init__(self, target: McpTarget) -> None:
        self._target = target
        self._stderr = _Stderr()
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp {target.title}")
        self.faults: tuple[type[Exception], ...] = _faults()
        """What a call raises where the server refuses it, or is gone."""

    @classmethod
    async def open(cls, target: McpTarget, *, timeout_s: float) -> Link:
        """Raises ResourceFailed where no server answers, with what it said."""
        link = cls(target)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([link._ready, link._task], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            await link.close()
            raise ResourceFailed(await link.explain(f"did not start within {timeout_s:g} s")) from error
        except asyncio.CancelledError:
            await link.close()
            raise
        if link._ready.done():
            return link
        failure = link._task.exception()
        await link.close()
        raise ResourceFailed(await link.explain(f"did not start ({_innermost(failure)})")) from failure

    @property
    def client(self) -> Client:
        return self._ready.result()

    async def answers(self, *, call_s: float) -> bool:
        """Whether the server is still there; ``call_s`` is what a call may take."""
        try:
            async with asyncio.timeout(min(max(call_s, MIN_PROBE_S), MAX_PROBE_S)):
                await self.client.list_tools(cache_mode="bypass")
        except (TimeoutError, *self.faults):
            return False
        return True

    async def close(self) -> None:
        """End the connection, and a server that was started for it."""
        self._stop.set()
        if not self._ready.done():
            self._task.cancel()
        elif self._target.url:
            asyncio.get_running_loop().call_later(GOODBYE_S, self._task.cancel)
        await asyncio.shield(asyncio.wait([self._task]))
        if not self._task.cancelled():
            self._task.exception()  # told by whoever waited for it; here it only ends

    async def explain(self, what: str) -> str:
        """A sentence about the server, with the end of what it wrote to its standard error."""
        lines = await self._stderr.last_lines()
        said = "".join(f"\n  {line}" for line in lines)
        return f"{self._target.title} {bare(what)}" + (f"; its last lines were:{said}" if said else "")

    async def _hold(self) -> None:
        from mcp import Client

        async with AsyncExitStack() as stack:
            transport = await self._transport(stack)
            client = await stack.enter_async_context(Client(transport))
            self._ready.set_result(client)
            await self._stop.wait()

    async def _transport(self, stack: AsyncExitStack) -> Any:
        target = self._target
        if target.url:
            return await _http_transport(stack, target)
        from mcp import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(
            command=target.command[0],
            args=list(target.command[1:]),
            env=dict(target.env),
            cwd=target.cwd or None,
            encoding_error_handler="replace",  # a byte that is no UTF-8 is no reason to lose a server
        )
        errors = await stack.enter_async_context(self._stderr.opened())
        return stdio_client(parameters, errlog=errors)


class _Stderr:
    """The end of what a server writes to its standard error."""

    def __init__(self) -> None:
        self._tail = b""
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Any, None]:
        """The file to give to the server."""
        reading, writing = os.pipe()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(reading, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        self._task = asyncio.create_task(self._read(reader), name="mcp stderr")
        try:
            with os.fdopen(writing, "w") as file:
                yield file
        finally:
            await asyncio.wait([self._task], timeout=LAST_WORDS_S)
            transport.close()
            self._task.cancel()

    async def last_lines(self) -> list[str]:
        return self._tail.decode("utf-8", "replace").splitlines()[-MAX_STDERR_LINES:]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            self._tail = (self._tail + data)[-MAX_STDERR_BYTES:]


async def _http_transport(stack: AsyncExitStack, target: McpTarget) -> Any:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(30.0, read=None)  # how long a call may take is said with the call
    client = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(target.headers), timeout=timeout))
    return streamable_http_client(target.url, http_client=client)


def _faults() -> tuple[type[Exception], ...]:
    import anyio
    import httpx2
    from mcp import MCPError

    return MCPError, httpx2.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError


def _innermost(error: BaseException | None) -> str:
    """The first cause in groups of causes."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error is not None else "it ended"
