"""``python -m wingbeat.server``: the control process (started by the supervisor).

Reads a :class:`Launch` as JSON from a file, binds, starts, writes ``server.json`` into the run
directory (the address and process id), and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
import uvloop
from pydantic import BaseModel

from wingbeat.core.config import Config
from wingbeat.core.config.server import is_loopback
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import ADMIN_KEY_VARIABLE, CLIENT_KEY_VARIABLE, WORKER_KEY_VARIABLE
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.tls import server_context
from wingbeat.server.control import Control
from wingbeat.server.http.app import create_app
from wingbeat.server.http.listening import KEEP_ALIVE_S, AnnouncedServer, OuterPort, bind, fitting_connections
from wingbeat.server.http.protocol import Bounds, bounded_protocol
from wingbeat.server.keys.file import KeyFile, exposed, key_file_path
from wingbeat.server.keys.ring import KeyRing, OwnKeys

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
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
