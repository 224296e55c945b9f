"""Bounds of one HTTP connection, below any route: how many there are, how large a head is, how slow a request comes.

uvicorn's own protocol waits for a head or a body for ever, a head may grow until memory ends, requests may queue up
by the thousand behind an answer that nobody reads.  A sweep once a second looks at what is under way, which costs a
request nothing but a note of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from wingbeat.core.config.server import is_loopback
from wingbeat.core.errors import WingbeatError
from wingbeat.server.http.error_answers import error_answer_bytes, http_fault

faults = logging.getLogger(__name__)
faults.setLevel(logging.ERROR)
"""Of a connection: a line for each bad request would let anyone fill the disk."""
MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers."""
LEAST_BYTES_PER_S = 1000.0
"""A body that comes more slowly is given up once ``request_timeout_s`` has passed."""
FRAMING_BYTES = 2**20
FRAMING_FACTOR = 16
"""Chunked bodies: framing, extensions and trailers may be so many bytes, and so many for each byte of the body."""


ANSWER_PATIENCE = 10
"""Times ``request_timeout_s``: how long a caller may read nothing of an answer that does not fit what is buffered."""
RESERVED = 256
"""Connections beyond ``max_connections`` that callers of this machine get: workers must come back to a full server."""


class Phase(Enum):
    """What a connection is receiving."""

    IDLE = "idle"
    """Between requests (uvicorn closes those that idle), or while one is being answered."""
    HEAD = "head"
    BODY = "body"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of ``server.max_connections`` and ``server.request_timeout_s``."""

    max_connections: int
    request_timeout_s: float


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds; make one with :func:`bounded_protocol`."""

    bounds: Bounds

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = faults
        self._phase = Phase.HEAD
        self._since = self.loop.time()
        """Since when the phase lasts, less the time in which nobody read."""
        self._head_bytes = 0
        self._received = 0
        """Bytes of the body."""
        self._raw = 0
        """Bytes that came since the head, the framing of chunks among them."""
        self._refused = False
        self._unread = -1
        """Bytes that wait to be read by the caller, at the last look; -1 where nothing had to wait."""
        self._unread_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections + reserved_for(self.client):
            error = http_fault(503, f"more than server.max_connections = {self.bounds.max_connections} connections")
            error.retryable = True
            self._refuse(error)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._phase is not Phase.BODY:
            self._head_bytes += len(data)
        else:
            self._raw += len(data)
        super().data_received(data)
        if self._phase is Phase.HEAD and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(http_fault(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"))
        elif self._raw > FRAMING_BYTES + FRAMING_FACTOR * self._received:
            self._refuse(http_fault(400, "the chunks of the body hold almost nothing"))

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(http_fault(400, "this is not HTTP/1.1"))

    # --- callbacks of the parser --------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is Phase.IDLE:  # else the head of a connection's first request, whose time already runs
            self._enter(Phase.HEAD)

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD_BYTES:  # else the rest of what came is its body
                self._refuse(http_fault(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"))
                return
        if self.cycle is not None and not self.cycle.response_complete:
            self._refuse(http_fault(400, "one request at a time: send the next one after the answer"))
            return
        self._enter(Phase.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._received += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._enter(Phase.IDLE)
            super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        if not self._refused:
            super().handle_websocket_upgrade()

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._head_bytes = self._received = self._raw = 0

    # --- the sweep ----------------------------------------------------------------------------

    def check(self, now: float, *, every_s: float) -> None:
        """Give a request up that comes too slowly, and a caller that does not read its answer.

        ``every_s``: the time since the last check.
        """
        if self.flow.write_paused or self.transport.is_closing():
            self._check_reader(now)
            return
        self._unread = -1
        if self._phase is Phase.IDLE:
            return
        if self.flow.read_paused:  # it is we who do not read
            self._since += every_s
            return
        if now - self._since > self.bounds.request_timeout_s + self._received / LEAST_BYTES_PER_S:
            error = http_fault(408, f"the {self._phase.value} of the request came too slowly")
            error.retryable = True
            self._refuse(error)

    def _check_reader(self, now: float) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread, self._unread_since = unread, now
            return
        patience = 1 if self.transport.is_closing() else ANSWER_PATIENCE
        if now - self._unread_since > self.bounds.request_timeout_s * patience:
            self.transport.abort()  # closing would wait for the reader

    def _refuse(self, error: WingbeatError) -> None:
        """Answer, unless an answer has begun, and close."""
        self._refused = True
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            head, body = error_answer_bytes(error)
            self.transport.write(STATUS_LINE[error.status] + head + b"connection: close\r\n\r\n" + body)
        if cycle is not None and not cycle.response_complete:  # it must not write any more
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def reserved_for(address: Sequence[Any] | None) -> int:
    """How many connections beyond the bound there may be for a caller from this address."""
    return RESERVED if address and is_loopback(str(address[0])) else 0


def bounded_protocol(bounds: Bounds) -> type[BoundedProtocol]:
    """The protocol of one server; uvicorn makes an instance per connection, so the bounds are the class's."""
    return type("ServerProtocol", (BoundedProtocol,), {"bounds": bounds})


def sweep(connections: Iterable[object], now: float, *, every_s: float) -> None:
    """Check all connections."""
    for connection in tuple(connections):
        if isinstance(connection, BoundedProtocol):
            connection.check(now, every_s=every_s)
