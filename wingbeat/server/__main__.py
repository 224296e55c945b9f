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
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from pydantic import BaseModel

from wingbeat.core.config import Config
from wingbeat.core.errors import PortInUse, SetupError
from wingbeat.core.files import write_atomically
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.server.app import create_app
from wingbeat.server.control import Control
from wingbeat.server.keys import RoleKeys

MAX_FRAME_BYTES = 1 << 30
GC_THRESHOLDS = (20_000, 20, 50)
"""Allocations before a collection of the youngest objects, and how many of those before one of the older."""
ORPHAN_GRACE_S = 10.0
"""How long control takes at most to close in peace once its supervisor is gone."""


class Launch(BaseModel):
    """What the supervisor tells control."""

    config: Config
    models: dict[str, Path]
    run_dir: Path
    sources: list[str] = []
    """Task sources that are on their way: nothing is dealt before all of them have come."""


def shorten_gc_pauses() -> None:
    """Take what the imports made out of the collector's sight, and let it look less often.

    A full collection traversed all of it: 149 ms in which no request was served (measured), the p99.9 of the
    gateway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


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


class AnnouncedServer(uvicorn.Server):
    """Writes its address once it serves, and not before: whoever reads it may call at once."""

    def __init__(self, config: uvicorn.Config, *, address_file: Path) -> None:
        super().__init__(config)
        self._address_file = address_file
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_signal: Callable[[], None] = lambda: None
        """Called on the loop when SIGTERM comes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and sockets:
            shorten_gc_pauses()
            host, port = sockets[0].getsockname()[:2]
            where = {"url": f"http://{host}:{port}", "pid": os.getpid()}
            write_atomically(self._address_file, json.dumps(where).encode())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Tell control before connections are closed, so that nobody's long wait is cut off."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.on_signal)
        super().handle_exit(sig, frame)


async def serve(launch: Launch, worker_key: str) -> None:
    """Run control until a signal."""
    config = launch.config
    keys = RoleKeys.of(config.server.admin_key, worker_key)
    listener = bind(config.server.host, config.server.port)
    control = Control(config, models=launch.models, run_dir=launch.run_dir, keys=keys, sources=launch.sources)
    server = AnnouncedServer(
        uvicorn.Config(
            create_app(control, keys),
            loop="none",
            http="httptools",
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
    )
    server.on_signal = control.announce_stop
    control.on_stop = lambda: setattr(server, "should_exit", True)
    await server.serve(sockets=[listener])
    if not server.started:
        raise RuntimeError("control could not start; the log above says why")
    if control.error is not None:
        raise RuntimeError("control failed; the log above says why") from control.error


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s control %(levelname)s %(message)s")
    launch = Launch.model_validate_json(Path(sys.argv[1]).read_bytes())
    end_with_supervisor(grace_s=ORPHAN_GRACE_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(launch, os.environ["WINGBEAT_WORKER_KEY"]))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
