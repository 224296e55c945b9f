"""The process of a resources server: listens, announces itself, tells control what it has, ends on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
import uvloop

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.config.server import ServerConfig, is_loopback
from wingbeat.core.errors import SetupError
from wingbeat.core.tls import server_context
from wingbeat.server.http.listening import KEEP_ALIVE_S, AnnouncedServer, OuterPort, bind, fitting_connections
from wingbeat.server.http.protocol import Bounds, bounded_protocol
from wingbeat.server.keys.file import KeyFile, exposed
from wingbeat.server.keys.ring import KeyRing, OwnKeys
from wingbeat.server.resources.announcing import Announcer
from wingbeat.server.resources.app import LendingServer

logger = logging.getLogger(__name__)

EVERY_ADDRESS = ("0.0.0.0", "::")

STOP_S = 10


@dataclass(frozen=True, slots=True)
class LendingLaunch:
    """What a resources server is started with."""

    resources: ResourcesConfig
    server: ServerConfig
    keys_file: Path
    address_file: Path | None = None
    """Where it writes its address once it serves."""
    own: OwnKeys = field(default_factory=OwnKeys, repr=False)
    """Keys of this start, of the supervisor's."""
    control: str = ""
    """The server that it reports to; "" for none."""
    control_key: str | None = field(default=None, repr=False)
    advertise: str = ""
    """As clients reach it; "": the address that it listens on."""
    on_ready: Callable[[str], None] = lambda url: None


def lending_keys(launch: LendingLaunch) -> KeyRing:
    """Raises SetupError where the server would be open to other machines."""
    file = KeyFile(launch.keys_file)
    file.check_present()
    keys = KeyRing.of(launch.server.admin_key, own=launch.own, file=file)
    if keys.is_open and not is_loopback(launch.resources.host):
        raise SetupError(exposed(launch.resources.host, file.path, setting="resources.host"))
    return keys


def run_lending(launch: LendingLaunch) -> None:
    """Serve until a signal.  Raises SetupError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_lending(launch))


async def serve_lending(launch: LendingLaunch) -> None:
    """Serve until a signal."""
    keys = lending_keys(launch)
    config, server = launch.resources, launch.server
    tls = _tls(server)
    bounds = Bounds(fitting_connections(server.max_connections), server.request_timeout_s)
    lending = LendingServer(config, server, keys)
    lending.check()
    listener = bind(config.host, config.port, setting="resources.port")
    host, port = listener.getsockname()[:2]
    url = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    announcer = Announcer(
        lending.pool,
        url=launch.advertise or reached_by(url, control=launch.control),
        kinds=tuple(config.kinds),
        control=launch.control,
        key=launch.control_key,
        on_ready=lambda: launch.on_ready(url),
    )
    http = _Server(
        uvicorn.Config(
            lending.app(),
            loop="none",
            http=bounded_protocol(bounds),
            timeout_keep_alive=KEEP_ALIVE_S,
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=STOP_S,
            lifespan="on",
        ),
        address_file=launch.address_file,
        outer=None if tls is None else OuterPort(listener, tls, bounds),
    )
    http.announcer, http.lending = announcer, lending
    await http.serve(sockets=[listener if tls is None else bind("127.0.0.1", 0)])
    if not http.started:
        raise SetupError("the resources server could not start; the log above says why")


class _Server(AnnouncedServer):
    """Tells control only once it serves."""

    announcer: Announcer
    lending: LendingServer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.announcer.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leases end first: whoever waits for one, or uses it, is told so at once, and holds nothing up."""
        await self.announcer.close()
        await self.lending.grants.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends it in peace, and is no fault afterwards."""
        before = {sign: signal.signal(sign, self.handle_exit) for sign in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sign, handler in before.items():
                signal.signal(sign, handler)


def _tls(server: ServerConfig) -> ssl.SSLContext | None:
    cert, key = server.tls_cert, server.tls_key
    return None if cert is None or key is None else server_context(Path(cert), Path(key))


def reached_by(url: str, *, control: str) -> str:
    """An address for others: of a server that listens on all addresses, the one by which it reaches ``control``."""
    parts, other = urlsplit(url), urlsplit(control)
    if parts.hostname not in EVERY_ADDRESS or not other.hostname:
        return url
    family = socket.AF_INET6 if ":" in other.hostname else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((other.hostname, other.port or 1))
        except OSError as error:
            raise SetupError(
                f"--server: cannot find a way to {control}: {error}; name its address with --advertise"
            ) from None
        host = probe.getsockname()[0]
    return parts._replace(netloc=f"{f'[{host}]' if ':' in host else host}:{parts.port}").geturl()
