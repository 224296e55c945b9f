"""``python -m wingbeat.server``: the control process (started by the supervisor).

Reads a :class:`Launch` as JSON from a file, binds, starts, writes ``server.json`` into the run
directory (the address and process id), and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from pydantic import BaseModel

from wingbeat.core.config import Config
from wingbeat.core.config.server import is_loopback
from wingbeat.core.errors import PortInUse, SetupError
from wingbeat.core.files import write_atomically
from wingbeat.core.keys import ADMIN_KEY_VARIABLE, CLIENT_KEY_VARIABLE, WORKER_KEY_VARIABLE
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.tls import server_context
from wingbeat.server.control import Control
from wingbeat.server.http.app import create_app
from wingbeat.server.http.protocol import Bounds, bounded_protocol, sweep
from wingbeat.server.http.tls_port import TlsPort
from wingbeat.server.keys.file import KeyFile, exposed, key_file_path
from wingbeat.server.keys.ring import KeyRing, OwnKeys

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
GC_THRESHOLDS = (20_000, 20, 50)
"""Allocations before a collection of the youngest objects, and how many of those before one of the older."""
OWN_FILES = 1024
"""Files that control has open besides its connections: the ledger, captures, logs; and what callers of this machine
have in reserve."""
SWEEP_EVERY_S = 1.0
"""How often slow requests are looked for."""
KEEP_ALIVE_S = 75
"""Longer than clients keep a connection (our SDK 60 s): one that closes while a request is sent loses the request."""
ORPHAN_GRACE_S = 10.0
"""How long control takes at most to close in peace once its supervisor is gone."""


class Launch(BaseModel):
    """What the supervisor tells control."""

    config: Config
    models: dict[str, Path]
    run_dir: Path
    sources: list[str] = []
    """Task sources that are on their way: nothing is dealt before all of them have come."""
    local_port: int = 0
    """With TLS: the port on loopback for the server's own processes; 0 takes a free one."""


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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.  Raises PortInUse or SetupError with the fix."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno in (98, 48):
            raise PortInUse(
                f"port {port} on {host} is in use; stop that process, or pass --server.port=0 for a free one"
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

    def __init__(self, config: uvicorn.Config, *, address_file: Path, outer: OuterPort | None = None) -> None:
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


def key_ring(launch: Launch, worker_key: str) -> KeyRing:
    """All keys of this server.  Raises SetupError where it would be open to other machines."""
    server = launch.config.server
    file = KeyFile(key_file_path(server.keys_file, runs=launch.run_dir.parent))
    file.check_present()  # also where it was removed while the run went on
    own = OwnKeys(admin=os.environ.get(ADMIN_KEY_VARIABLE), client=os.environ.get(CLIENT_KEY_VARIABLE))
    workers = (worker_key, *((server.worker_key,) if server.worker_key is not None else ()))
    keys = KeyRing.of(server.admin_key, *workers, own=own, file=file)
    if keys.is_open and not is_loopback(server.host):
        raise SetupError(exposed(server.host, file.path))
    return keys


def _tls(config: Config) -> ssl.SSLContext | None:
    cert, key = config.server.tls_cert, config.server.tls_key
    return None if cert is None or key is None else server_context(Path(cert), Path(key))


async def serve(
    launch: Launch,
    worker_key: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> None:
    """Run control until a signal."""
    config = launch.config
    keys = key_ring(launch, worker_key)
    tls = _tls(config)
    bounds = Bounds(fitting_connections(config.server.max_connections), config.server.request_timeout_s)
    listener = bind(config.server.host, config.server.port)
    control = Control(
        config,
        models=launch.models,
        run_dir=launch.run_dir,
        keys=keys,
        sources=launch.sources,
        clock=clock,
        wall=wall,
    )
    server = AnnouncedServer(
        uvicorn.Config(
            create_app(control, keys),
            loop="none",
            http=bounded_protocol(bounds),
            timeout_keep_alive=KEEP_ALIVE_S,
            ws="websockets-sansio",
            ws_max_size=MAX_FRAME_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=3,
            lifespan="on",
        ),
        address_file=launch.run_dir / "server.json",
        outer=None if tls is None else OuterPort(listener, tls, bounds),
    )
    server.on_signal = control.announce_stop
    control.on_stop = lambda: setattr(server, "should_exit", True)
    await server.serve(sockets=[listener if tls is None else bind("127.0.0.1", launch.local_port)])
    if not server.started:
        raise RuntimeError("control could not start; the log above says why")
    if control.error is not None:
        raise RuntimeError("control failed; the log above says why") from control.error


def _is_a_fault(record: logging.LogRecord) -> bool:
    """uvicorn takes a WebSocket that was refused with an answer for an application that forgot to answer."""
    return "without completing handshake" not in record.getMessage()


def main(*, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
    """Entry point of the process; other clocks are for tests of what a jump of them does."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s control %(levelname)s %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_is_a_fault)
    launch = Launch.model_validate_json(Path(sys.argv[1]).read_bytes())
    end_with_supervisor(grace_s=ORPHAN_GRACE_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(launch, os.environ[WORKER_KEY_VARIABLE], clock=clock, wall=wall))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
