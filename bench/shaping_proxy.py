"""A TCP proxy with the manners of a long line: so many milliseconds, so many bits per second, and losses.

Each direction of each connection is delayed, and all connections share the rate of a direction, as they share a line.
TCP hides lost packets: what its users see of one is a stall of a round trip or more, and now and then a connection that
is given up.  Those are what is emulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

CHUNK = 4096
"""Bytes that travel together: small enough that messages of other connections get in between."""


@dataclass(frozen=True, slots=True)
class Line:
    """What the line is like."""

    round_trip_s: float = 0.3
    bits_per_s: float = 4e6
    loss: float = 0.01
    """Of the pieces of 4 KiB, the share that stalls its connection for a retransmission time-out."""
    reset_every_s: float = 20.0
    """Seconds between resets of a connection, on average; 0: none."""


class _Direction:
    """One way of the line: pieces leave one after the other, at its rate."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._free_at = 0.0
        self.num_bytes = 0

    def departure(self, size: int, now_s: float) -> float:
        """When a piece that comes now has left."""
        self._free_at = max(self._free_at, now_s) + 8 * size / self._line.bits_per_s
        self.num_bytes += size
        return self._free_at


class ShapingProxy:
    """Listens on a port of loopback and forwards to another one; an async context manager."""

    def __init__(self, target_port: int, line: Line, *, seed: int = 0) -> None:
        self.num_resets = 0
        self.num_stalls = 0
        self._target_port = target_port
        self._line = line
        self._rng = random.Random(seed)
        self._up, self._down = _Direction(line), _Direction(line)
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def num_bytes(self) -> int:
        """Carried, both ways."""
        return self._up.num_bytes + self._down.num_bytes

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        if self._line.reset_every_s:
            self._start(self._reset_some())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was aborted closes its socket on the loop's next turn

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._start(self._serve(reader, writer))

    async def _reset_some(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._line.reset_every_s))
            if self._pairs:
                self.num_resets += 1
                for writer in self._rng.choice(self._pairs):
                    writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self._line.round_trip_s)  # the handshake
        try:
            there, out = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, out)
        self._pairs.append(pair)
        ways = [
            asyncio.create_task(self._carry(reader, out, self._up)),
            asyncio.create_task(self._carry(there, writer, self._down)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for way in ways:  # a reset of one end is the end of both
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._pairs.remove(pair)
            for end in pair:
                end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Direction) -> None:
        """Pieces arrive in order, each half a round trip after it has left; a sender feels the rate."""
        loop = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)

        async def deliver() -> None:
            while True:
                at_s, data = await on_the_way.get()
                await asyncio.sleep(at_s - loop.time())
                if not data:
                    with contextlib.suppress(OSError, RuntimeError):
                        writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        arrival_s = 0.0
        try:
            while data := await reader.read(CHUNK):
                left_s = way.departure(len(data), loop.time())
                arrival_s = max(arrival_s, left_s + self._line.round_trip_s / 2)
                if self._rng.random() < self._line.loss:
                    self.num_stalls += 1
                    arrival_s += self._rng.uniform(1.0, 2.0) * self._line.round_trip_s
                await on_the_way.put((arrival_s, data))
                await asyncio.sleep(left_s - loop.time())
            await on_the_way.put((arrival_s, b""))
            await delivering
        finally:
            delivering.cancel()
