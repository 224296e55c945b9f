"""``/weights/v1``: weight files for engines on other hosts, and from trainers on other hosts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from wingbeat.core.errors import NotFoundError, RequestError
from wingbeat.server.control import Control
from wingbeat.server.http.error_answers import error_response
from wingbeat.server.keys.principals import MAY_WORK
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.weights.files import Part, WrongOffset
from wingbeat.weights.ranges import OFFSET_HEADER, SHA256_HEADER, BadRange, asked_bytes, content_headers

CHUNK_BYTES = 2**20
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def weight_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes, bound to one control."""
    router = APIRouter(tags=["weights"])

    @router.get("/weights/v1/{policy}/{file}")
    async def content(request: Request, policy: str, file: str) -> Response:
        keys.require(request.headers, MAY_WORK)
        path, found = control.weight_files.find(policy, file)
        size = found.size_bytes
        try:
            asked = asked_bytes(request.headers.get("range", ""), size=size)
        except BadRange as error:
            return Response(str(error), 416, {"Content-Range": f"bytes */{size}"}, media_type="text/plain")
        try:
            chunks = await _read(path, *asked)
        except FileNotFoundError:
            raise NotFoundError(
                f"weight file {file!r} of policy {policy!r} is gone; its version was released"
            ) from None
        return StreamingResponse(
            chunks,
            200 if asked == (0, size) else 206,
            content_headers(asked, size=size, sha256=found.sha256),
            media_type="application/octet-stream",
        )

    @router.put("/weights/v1/{policy}/{file}")
    async def bring(request: Request, policy: str, file: str) -> Response:
        keys.require(request.headers, MAY_WORK)
        start, end, total = _part(request.headers.get("content-range", ""))
        data = await request.body()
        if len(data) != end - start:
            raise RequestError(f"the body has {len(data)} bytes, and Content-Range says {end - start}")
        part = Part(policy, file, request.headers.get(SHA256_HEADER, ""), start, total, data)
        try:
            offset = await asyncio.to_thread(control.weight_files.take, part)
        except WrongOffset as error:
            return error_response(error, {OFFSET_HEADER: str(error.offset)})
        answer: dict[str, Any] = {"offset": offset, "complete": offset == total}
        return JSONResponse(answer, headers={OFFSET_HEADER: str(offset)})

    return router


def _part(header: str) -> tuple[int, int, int]:
    """First byte, the one behind the last, and the file's size."""
    found = _PART.fullmatch(header.strip())
    if found is None:
        raise RequestError(f"expected Content-Range: bytes FIRST-LAST/SIZE, got {header!r:.80}", param="Content-Range")
    return int(found[1]), int(found[2]) + 1, int(found[3])


async def _read(path: Path, start: int, end: int) -> AsyncIterator[bytes]:
    """Opened at once: what is deleted while it is sent is sent to its end.  Raises FileNotFoundError."""
    source = await asyncio.to_thread(path.open, "rb")

    async def chunks() -> AsyncIterator[bytes]:
        with source:
            source.seek(start)
            left = end - start
            while left:
                chunk = await asyncio.to_thread(source.read, min(CHUNK_BYTES, left))
                if not chunk:
                    return  # shorter than it was published: the receiver sees that bytes are missing
                left -= len(chunk)
                yield chunk

    return chunks()
