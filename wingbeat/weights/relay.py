"""A host that holds weight files serves them to others, so that control sends each byte to few hosts only.

A file is passed on while it still comes in: along a chain of relays a version takes little longer than to the first.
It is verified by whoever receives it; what turns out damaged breaks off here and there alike.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from aiohttp import web

from wingbeat.core.errors import SetupError
from wingbeat.core.weight_protocol import Manifest, WeightFile
from wingbeat.weights.ranges import BadRange, asked_bytes, content_headers
from wingbeat.weights.store import HostStore

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
POLL_S = 0.02
"""How often a file that grows is looked at."""
TOLD_S = 10.0
"""How long a file of which this host has not been told yet is waited for: control tells all at about the same time."""
EVERY_ADDRESS = ("", "0.0.0.0", "[::]")
"""Hosts at which to listen, and which nobody can dial."""
EXPECTED = 64
"""Versions whose files may be asked for."""


class RelayServer:
    """Runs on a thread of its own; listens once it is made, answers from :meth:`start` on."""

    def __init__(self, listen: str, *, dial: str, stall_s: float = 30.0) -> None:
        """``listen``: ``[HOST:]PORT``; without a host on every address, and named by the one from which ``dial`` (the
        server's URL) is reached.  Raises SetupError.
        """
        host, _, port = listen.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise SetupError(f"expected a relay's address as [HOST:]PORT, got {listen!r}")
        self._stall_s = stall_s
        self._socket = _bind(host.strip("[]"), int(port))
        name = _own_address(dial) if host in EVERY_ADDRESS else host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        self.store: HostStore | None = None
        """What is served; set once there is something."""
        self.key = ""
        """To whom: of the last welcome; "" to nobody."""
        self._expected: dict[tuple[str, str], tuple[Manifest, WeightFile]] = {}
        """By policy and name; oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="relay", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._is_up.wait()

    def expect(self, manifest: Manifest) -> None:
        """The files of a version will be here."""
        for file in manifest.files:
            self._expected[(manifest.policy, file.name)] = (manifest, file)
        while len(self._expected) > EXPECTED * 2:
            del self._expected[next(iter(self._expected))]

    def close(self) -> None:
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5.0)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application()
        application.router.add_get("/weights/v1/{policy}/{name}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.SockSite(runner, self._socket).start()
        self._is_up.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self.key or not hmac.compare_digest(given.encode(), self.key.encode()):
            return web.Response(status=401, text="this relay serves the workers of its own run")
        known = await self._told(request.match_info["policy"], request.match_info["name"])
        if known is None or self.store is None:
            return web.Response(status=404, text="this relay has not been told of such a file")
        manifest, file = known
        path = await self._found(self.store, manifest, file)
        if path is None:
            return web.Response(status=404, text="this relay made the version of other files")
        if not path.exists():
            return web.Response(status=503, text="this relay is receiving the file", headers={"Retry-After": "1"})
        return await self._send(request, self.store, file)

    async def _told(self, policy: str, name: str) -> tuple[Manifest, WeightFile] | None:
        until = asyncio.get_running_loop().time() + TOLD_S
        while (known := self._expected.get((policy, name))) is None:
            if asyncio.get_running_loop().time() >= until:
                return None
            await asyncio.sleep(POLL_S)
        return known

    async def _found(self, store: HostStore, manifest: Manifest, file: WeightFile) -> Path | None:
        """Where the file is or grows; a path at which nothing is where it will come, None where it will not."""
        path, partial = store.path(file.name), store.partial(file.name)
        until = asyncio.get_running_loop().time() + TOLD_S
        while not path.exists() and not partial.exists():
            if store.path(manifest.files[0].name).exists():
                return None
            if asyncio.get_running_loop().time() >= until:
                return path
            await asyncio.sleep(POLL_S)
        return path if path.exists() else partial

    async def _send(self, request: web.Request, store: HostStore, file: WeightFile) -> web.StreamResponse:
        size = file.size_bytes
        try:
            asked = asked_bytes(request.headers.get("Range", ""), size=size)
        except BadRange as error:
            return web.Response(status=416, text=str(error), headers={"Content-Range": f"bytes */{size}"})
        response = web.StreamResponse(
            status=200 if asked == (0, size) else 206,
            headers=content_headers(asked, size=size, sha256=file.sha256),
        )
        await response.prepare(request)
        async for chunk in self._chunks(store, file, *asked):
            await response.write(chunk)
        return response

    async def _chunks(self, store: HostStore, file: WeightFile, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes as they come in.  Raises ConnectionResetError where they stop coming: the caller sees too few."""
        loop = asyncio.get_running_loop()
        moved_at = loop.time()
        with _opened(store, file) as source:
            source.seek(start)
            while start < end:
                is_deleted = os.fstat(source.fileno()).st_nlink == 0  # before it is read: what came is passed on
                chunk = source.read(min(CHUNK_BYTES, end - start))
                if chunk:
                    start, moved_at = start + len(chunk), loop.time()
                    yield chunk
                elif is_deleted or loop.time() - moved_at > self._stall_s:
                    raise ConnectionResetError(f"{file.name} stopped coming in")
                else:
                    await asyncio.sleep(POLL_S)


def _opened(store: HostStore, file: WeightFile) -> BinaryIO:
    """What grows, or what has become of it meanwhile."""
    try:
        return store.partial(file.name).open("rb")
    except FileNotFoundError:
        return store.path(file.name).open("rb")


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SetupError(f"cannot relay weights on {host or '*'}:{port}: {error}; name another address") from None
    return listener


def _own_address(dial: str) -> str:
    """The address of this host on the way to a server."""
    server = urlsplit(dial)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((server.hostname or "", server.port or 80))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            raise SetupError(f"no address of this host is known: {error}; name it, --relay HOST:PORT") from None
