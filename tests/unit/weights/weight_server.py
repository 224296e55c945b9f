"""A server of weight files on loopback that can be told to misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from wingbeat.core.weight_protocol import Manifest
from wingbeat.weights.pull import Source
from wingbeat.weights.ranges import asked_bytes, content_headers

KEY = "worker-key"


class WeightServer:
    """Gives the files of the manifests that it is given."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[Path, Any]] = {}
        self.faults: deque[str] = deque()
        """What the next answers do: "cut" (in the middle), "flip" (a bit), "other" (name another file), or a status."""
        self.asked: list[tuple[str, str]] = []
        """Name and range of each request."""
        self.sent: Counter[str] = Counter()
        """Bytes by name."""
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def give(self, manifest: Manifest) -> None:
        for file in manifest.files:
            self.files[file.name] = (Path(manifest.path).with_name(file.name), file)

    @property
    def source(self) -> Source:
        return Source(self.url, KEY)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        assert self._loop is not None and self._stop is not None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application()
        application.router.add_get("/weights/v1/{policy}/{name}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._is_up.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        name = request.match_info["name"]
        self.asked.append((name, request.headers.get("Range", "")))
        fault = self.faults.popleft() if self.faults else ""
        if fault.isdigit():
            return web.Response(status=int(fault))
        if name not in self.files or not self.files[name][0].exists():
            return web.Response(status=404)
        path, file = self.files[name]
        asked = asked_bytes(request.headers.get("Range", ""), size=file.size_bytes)
        data = bytearray(path.read_bytes()[slice(*asked)])
        if fault == "flip":
            data[len(data) // 2] ^= 4
        response = web.StreamResponse(
            status=206 if asked[0] else 200,
            headers=content_headers(asked, size=file.size_bytes, sha256=file.sha256),
        )
        if fault == "other":
            response.headers["ETag"] = f'"{"0" * 64}"'
        await response.prepare(request)
        if fault == "cut":
            del data[len(data) // 2 :]
        self.sent[name] += len(data)
        await response.write(bytes(data))
        if fault == "cut":
            assert request.transport is not None
            request.transport.close()
        return response
