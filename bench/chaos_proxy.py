"""A TCP proxy that misbehaves on demand: what networks do to long-lived connections, at a time of our choosing.

Bytes that were lost cannot be made up for: a connection that lost some ends with a reset once the network is
back, as it does behind a firewall that has forgotten it.  One that lost none goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

CHUNK = 65_536
CONNECT_S = 5.0
LINGER_NONE = struct.pack("ii", 1, 0)
"""Close with a reset (RST), and without what is unsent."""


class _Pipe:
    """One client's connection and the one to the server behind it."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.has_lost = False
        """Bytes of it were swallowed."""

    def reset(self) -> None:
        for writer in self.writers:
            raw: socket.socket | None = writer.get_extra_info("socket")
            if raw is not None:
                with contextlib.suppress(OSError):  # the other end was faster
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
            writer.transport.abort()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class ChaosProxy:
    """Listens on a port of loopback and forwards to another one; an async context manager."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.num_resets = 0
        """Connections that were reset, for whatever reason."""
        self._target_port = target_port
        self._pipes: set[_Pipe] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._delay_s = 0.0
        self._is_partitioned = False
        self._truncates = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._pipes)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- faults -------------------------------------------------------------------------------

    def reset(self) -> None:
        """End every connection with a reset, both ways."""
        for pipe in tuple(self._pipes):
            self._reset(pipe)

    async def partition(self, duration_s: float) -> None:
        """Swallow every byte both ways for so long; connections that lost some are reset afterwards."""
        self._is_partitioned = True
        try:
            await asyncio.sleep(duration_s)
        finally:
            self._is_partitioned = False
            for pipe in tuple(self._pipes):
                if pipe.has_lost:
                    self._reset(pipe)

    async def slow(self, duration_s: float, *, delay_s: float) -> None:
        """Hold each piece of data back for ``delay_s``."""
        self._delay_s = delay_s
        try:
            await asyncio.sleep(duration_s)
        finally:
            self._delay_s = 0.0

    async def truncate(self, duration_s: float) -> None:
        """Let the first half of the next piece of each connection's answers through, then reset the connection."""
        self._truncates = True
        try:
            await asyncio.sleep(duration_s)
        finally:
            self._truncates = False

    def _reset(self, pipe: _Pipe) -> None:
        if pipe in self._pipes:
            self._pipes.discard(pipe)
            self.num_resets += 1
            pipe.reset()

    # --- forwarding ---------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._start(self._serve(reader, writer))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except (OSError, TimeoutError):  # nobody listens there: the client is told as a gateway's client would be
            _Pipe((writer, writer)).reset()
            return
        pipe = _Pipe((writer, server_writer))
        self._pipes.add(pipe)
        ways = [
            self._start(self._forward(pipe, reader, server_writer, is_answer=False)),
            self._start(self._forward(pipe, server_reader, writer, is_answer=True)),
        ]
        await asyncio.wait(ways)
        self._pipes.discard(pipe)
        pipe.close()

    async def _forward(
        self, pipe: _Pipe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        """Until one side ends.  An end that comes while the network is away is not heard either."""
        try:
            while data := await reader.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if self._is_partitioned or pipe.has_lost:
                    pipe.has_lost = True
                    continue
                if self._truncates and is_answer:
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    self._reset(pipe)
                    return
                writer.write(data)
                await writer.drain()
            if self._is_partitioned:
                pipe.has_lost = True
            elif writer.can_write_eof():
                writer.write_eof()
        except OSError:  # reset by either side, perhaps by us: so is the other
            self._reset(pipe)
