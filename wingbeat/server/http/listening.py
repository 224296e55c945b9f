"""Listening: a bound socket, with TLS in front where it is configured, files enough, and an address once it serves."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from wingbeat.core.errors import PortInUse, SetupError
from wingbeat.core.files import write_atomically
from wingbeat.server.http.protocol import Bounds, sweep
from wingbeat.server.http.tls_port import TlsPort

logger = logging.getLogger(__name__)

GC_THRESHOLDS = (20_000, 20, 50)
"""Allocations before a collection of the youngest objects, and how many of those before one of the older."""
OWN_FILES = 1024
"""Files that control has open besides its connections: the ledger, captures, logs; and what callers of this machine
have in reserve."""
SWEEP_EVERY_S = 1.0
"""How often slow requests are looked for."""
KEEP_ALIVE_S = 75
"""Longer than clients keep a connection (our SDK 60 s): one that closes while a request is sent loses the request."""


def shorten_gc_pauses() -> None:
    """Take what the imports made out of the collector's sight, and let it look less often.

    A full collection traversed all of it: 149 ms in which no request was served (measured), the p99.9 of the
    gateway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def allow_files(wanted: int) -> int:
    """Let this process have as many files and connections open as the system permits, up to ``wanted``; how many.

    The usual 1024 of a login shell would end at a thousand connections with an error per call.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def fitting_connections(wanted: int) -> int:
    """How many connections of ``server.max_connections`` leave the ledger its files, whatever callers do."""
    num_files = allow_files(wanted + OWN_FILES)
    fitting = max(num_files - OWN_FILES, num_files // 2)
    if fitting < wanted:
        logger.warning(
            "server.max_connections = %d: this system lets a process have %d files open, so %d connections are"
            " accepted; raise the hard limit (ulimit -Hn)",
            wanted,
            num_files,
            fitting,
        )
    return min(wanted, fitting)


def bind(host: str, port: int, *, setting: str = "server.port") -> socket.socket:
    """A listening socket; ``setting`` is the key that names the port.  Raises PortInUse or SetupError with the fix."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno in (98, 48):
            raise PortInUse(
                f"port {port} on {host} is in use; stop that process, or pass --{setting}=0 for a free one"
            ) from None
        raise SetupError(f"cannot listen on {host}:{port}: {error}") from None
    listener.listen(2048)
    return listener


@dataclass(frozen=True, slots=True)
class OuterPort:
    """Where other machines come in, with TLS."""

    listener: socket.socket
    context: ssl.SSLContext
    bounds: Bounds


class AnnouncedServer(uvicorn.Server):
    """Writes its address once it serves, and not before: whoever reads it may call at once."""

    def __init__(self, config: uvicorn.Config, *, address_file: Path | None, outer: OuterPort | None = None) -> None:
        """``outer``: with TLS, where other machines come in; the sockets of ``serve`` are without."""
        super().__init__(config)
        self._address_file = address_file
        self._outer = outer
        self._tls_port: TlsPort | None = None
        self._swept = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_signal: Callable[[], None] = lambda: None
        """Called on the loop when SIGTERM comes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and sockets:
            shorten_gc_pauses()
            url = local_url = _url("http", sockets[0])
            if self._outer is not None:
                url = _url("https", self._outer.listener)
                self._tls_port = TlsPort(
                    self._outer.listener,
                    self._outer.context,
                    self._outer.bounds,
                    make=self._protocol,
                    connections=self.server_state.connections,
                )
            where = {"url": url, "local_url": local_url, "pid": os.getpid()}
            if self._address_file is not None:
                write_atomically(self._address_file, json.dumps(where).encode())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls_port is not None:
            self._tls_port.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        """Also look for requests that come too slowly."""
        now = asyncio.get_running_loop().time()
        if now - self._swept >= SWEEP_EVERY_S:
            sweep(self.server_state.connections, now, every_s=now - self._swept)
            self._swept = now
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Tell control before connections are closed, so that nobody's long wait is cut off."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.on_signal)
        super().handle_exit(sig, frame)


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
