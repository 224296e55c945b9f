"""A load generator that costs little: prebuilt requests over keep-alive connections, replies only delimited.

aiohttp would spend more time per request than what is to be measured here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter
from typing import Self, cast

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and how long it took."""

    status: int
    body: bytes
    """As it was on the wire: a chunked body has its chunk sizes in it."""
    first_s: float
    """Until the first byte."""
    total_s: float


def http_request(method: str, path: str, body: bytes = b"", *, headers: str = "") -> bytes:
    """The bytes of a request; ``headers`` are lines that end with CRLF."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._first = 0.0
        self._end = -1
        """Length of the reply once known; 0 for a chunked one, -1 before the head is there."""
        self._lost = False

    @classmethod
    async def open(cls, port: int) -> Self:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def send(self, request: bytes) -> Answer:
        """Raises ConnectionError where the other side closes before its reply is complete."""
        if self._lost:
            raise ConnectionError("the connection is closed")
        self._buffer.clear()
        self._end, self._first = -1, 0.0
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        started = perf_counter()
        self._transport.write(request)
        await waiter
        total = perf_counter() - started
        head_end = self._buffer.index(HEAD_END) + len(HEAD_END)
        status = int(self._buffer[9:12])
        return Answer(status, bytes(self._buffer[head_end:]), self._first - started, total)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError(f"the server closed the connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._first:
            self._first = perf_counter()
        if self._end < 0:
            self._read_head()
        complete = self._buffer.endswith(LAST_CHUNK) if self._end == 0 else 0 < self._end <= len(self._buffer)
        if complete and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_head(self) -> None:
        end = self._buffer.find(HEAD_END)
        if end < 0:
            return
        self._end = 0
        for line in self._buffer[:end].lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self._end = end + len(HEAD_END) + int(line[15:])
