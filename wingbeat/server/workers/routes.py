"""What engines on other hosts ask for besides their connection, and what admins ask of engines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from wingbeat.core.errors import NotFoundError
from wingbeat.core.files import sha256_of
from wingbeat.core.model_files import model_files
from wingbeat.core.protocol import DrainRequest
from wingbeat.core.worker_protocol import Drain
from wingbeat.server.control import Control
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.keys.principals import MAY_ADMINISTRATE, MAY_WORK
from wingbeat.server.keys.ring import KeyRing


class Digests:
    """sha256 of files, computed once for each state of a file, off the event loop."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int, int], str] = {}
        self._computing = asyncio.Lock()

    async def of(self, path: Path) -> str:
        stat = os.stat(path)
        key = (path, stat.st_size, stat.st_mtime_ns)
        async with self._computing:  # one after the other: they read a disk
            if key not in self._known:
                self._known[key] = await asyncio.to_thread(sha256_of, path)
            return self._known[key]


def worker_routes(control: Control, keys: KeyRing) -> APIRouter:
    """Model files for workers, and the draining of engines."""
    router, digests = APIRouter(), Digests()

    def folder(policy: str) -> Path:
        host = control.policies.get(policy)
        if host is None:
            raise NotFoundError(f"there is no policy {policy!r}, only {', '.join(control.policies)}")
        return Path(host.spec.model)

    @router.get("/worker/v1/models/{policy}")
    async def files(request: Request, policy: str) -> dict[str, Any]:
        keys.require(request.headers, MAY_WORK)
        found = [
            {"name": path.name, "size_bytes": path.stat().st_size, "sha256": await digests.of(path)}
            for path in model_files(folder(policy))
        ]
        return {"files": found}

    @router.get("/worker/v1/models/{policy}/{file}")
    async def content(request: Request, policy: str, file: str) -> Response:
        keys.require(request.headers, MAY_WORK)
        path = next((path for path in model_files(folder(policy)) if path.name == file), None)
        if path is None:
            raise NotFoundError(f"the model of policy {policy!r} has no file {file!r}")
        return FileResponse(path, media_type="application/octet-stream")

    @router.post("/api/engines/{name}/drain", openapi_extra=body_schema(DrainRequest))
    async def drain(request: Request, name: str) -> dict[str, str]:
        keys.require(request.headers, MAY_ADMINISTRATE)
        wanted = parse(DrainRequest, await request.body() or b"{}")
        links = {link.worker_id: link for link in control.engines.links}
        if name not in links:
            raise NotFoundError(f"no engine named {name!r} is connected, only {', '.join(links) or 'none'}")
        control.engines.stop_sending(links[name])
        links[name].send(Drain(drain_s=wanted.drain_s))
        return {"state": "leaving"}

    return router
