"""Connections of a TLS port count from their first byte, and end with a handshake that does not."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trustme

from wingbeat.server.http.protocol import RESERVED, Bounds
from wingbeat.server.http.tls_port import TlsPort

MAX_CONNECTIONS = 4
TIMEOUT_S = 1.0


class Echo(asyncio.Protocol):
    """What speaks behind the TLS."""

    def __init__(self, connections: set[object]) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)


@asynccontextmanager
async def tls_port(authority: trustme.CA, *, timeout_s: float = 60.0) -> AsyncIterator[tuple[TlsPort, int]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    connections: set[object] = set()
    port = TlsPort(
        listener,
        context,
        Bounds(MAX_CONNECTIONS, timeout_s),
        make=lambda: Echo(connections),
        connections=connections,
    )
    try:
        yield port, listener.getsockname()[1]
    finally:
        port.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def echoed(port: int, trust: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="localhost")
    writer.write(b"hello")
    try:
        return await reader.readexactly(5)
    finally:
        writer.close()


async def test_callers_without_a_handshake_are_bounded() -> None:
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    async with tls_port(authority) as (port, number):
        assert await echoed(number, trust) == b"hello"
        await until(lambda: port.num_connections == 0)
        most = MAX_CONNECTIONS + RESERVED
        silent = [await asyncio.open_connection("127.0.0.1", number) for _ in range(most)]
        try:
            await until(lambda: port.num_connections == most)
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await echoed(number, trust)
        finally:
            for _, writer in silent:
                writer.close()
        await until(lambda: port.num_connections == 0)
        assert await echoed(number, trust) == b"hello"


async def test_callers_without_a_handshake_are_let_go() -> None:
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    async with tls_port(authority, timeout_s=TIMEOUT_S) as (port, number):
        silent = [await asyncio.open_connection("127.0.0.1", number) for _ in range(MAX_CONNECTIONS)]
        async with asyncio.timeout(20):
            assert [await reader.read() for reader, _ in silent] == [b""] * MAX_CONNECTIONS
        await until(lambda: port.num_connections == 0)
        assert await echoed(number, trust) == b"hello"
        for _, writer in silent:
            writer.close()


async def test_what_is_no_tls_ends_and_so_do_handshakes_of_a_port_that_closes() -> None:
    authority = trustme.CA()
    async with tls_port(authority) as (port, number):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        await until(lambda: port.num_connections == 1)
        port.close()
        await until(lambda: port.num_connections == 0)
        writer.close()
