"""Callers that do not read: an answer waits for them, but not for ever, and no second one behind it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from wingbeat.server.http.protocol import ANSWER_PATIENCE, RESERVED, BoundedProtocol, Bounds, bounded_protocol

TIMEOUT_S = 30.0
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class FakeLoop:
    def time(self) -> float:
        return 0.0

    def create_task(self, work: Any) -> Any:
        work.close()
        return FakeTask()


class FakeTask:
    def add_done_callback(self, callback: Any) -> None: ...


class FakeTransport:
    """``waiting``: bytes that the caller has not read."""

    def __init__(self, address: str = "192.0.2.1") -> None:
        self.waiting = 0
        self.written = b""
        self.closing = False
        self.aborted = False
        self._address = address

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (self._address, 1), "sockname": ("192.0.2.2", 2)}.get(name, default)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None: ...


def connected(state: ServerState, transport: FakeTransport, *, max_connections: int = 10) -> BoundedProtocol:
    config = uvicorn.Config(app=cast(Any, None), loop="none", ws="none", interface="asgi3", log_config=None)
    config.loaded_app = cast(Any, None)
    config.loaded = True
    kind = bounded_protocol(Bounds(max_connections, TIMEOUT_S))
    config.ws_protocol_class = None
    protocol = kind(config, state, {}, cast(Any, FakeLoop()))
    protocol.connection_made(cast(Any, transport))
    return protocol


@pytest.mark.parametrize(("closing", "patience_s"), [(False, TIMEOUT_S * ANSWER_PATIENCE), (True, TIMEOUT_S)])
def test_who_reads_nothing_for_long_is_cut_off(closing: bool, patience_s: float) -> None:
    transport = FakeTransport()
    protocol = connected(ServerState(), transport)
    protocol.data_received(GET)
    protocol.pause_writing()
    transport.closing = closing
    transport.waiting = 1000
    protocol.check(100.0, every_s=1.0)
    transport.waiting = 900  # it reads
    protocol.check(100.0 + patience_s + 1, every_s=1.0)
    assert not transport.aborted
    protocol.check(100.0 + 2 * patience_s, every_s=1.0)
    assert not transport.aborted
    protocol.check(100.0 + 2 * patience_s + 2, every_s=1.0)
    assert transport.aborted


def test_an_answer_that_was_read_is_forgotten() -> None:
    transport = FakeTransport()
    protocol = connected(ServerState(), transport)
    protocol.data_received(GET)
    transport.waiting = 1000
    for start_s in (0.0, 10_000.0):
        protocol.pause_writing()
        protocol.check(start_s, every_s=1.0)
        protocol.resume_writing()
        protocol.check(start_s + 1, every_s=1.0)
    assert not transport.aborted


def test_requests_do_not_queue_up_behind_an_answer() -> None:
    transport = FakeTransport()
    protocol = connected(ServerState(), transport)
    protocol.data_received(GET * 1000)
    assert transport.written.startswith(b"HTTP/1.1 400 ") and b"one request at a time" in transport.written
    assert transport.written.count(b"HTTP/1.1") == 1 and transport.closing
    assert not protocol.pipeline and protocol.cycle.disconnected, "what was begun writes no second answer"


def test_callers_of_this_machine_come_in_where_others_do_not() -> None:
    state = ServerState()
    for address, most in (("192.0.2.1", 2), ("127.0.0.1", 2 + RESERVED)):
        while len(state.connections) < most:
            transport = FakeTransport(address)
            connected(state, transport, max_connections=2)
            assert not transport.closing
        transport = FakeTransport(address)
        protocol = connected(state, transport, max_connections=2)
        assert transport.closing and b"server.max_connections = 2" in transport.written
        state.connections.discard(protocol)
