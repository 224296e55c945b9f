"""What routes read from a request: its body as JSON, and whether its caller is still there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.types import Receive

from wingbeat.core.errors import PayloadTooLarge, RequestError, UnavailableError

R = TypeVar("R")
LONG_BODY_BYTES = 32_000
NOT_FINITE = re.compile(rb"\b(NaN|Infinity)\b")


def is_long(body: bytes) -> bool:
    """Whether reading what it says takes so long that others would notice: then do it in a thread."""
    return len(body) > LONG_BODY_BYTES


def decode_json(body: bytes) -> Any:
    """Raises RequestError where the body is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        hint = "; JSON knows no NaN and no Infinity: send finite numbers" if NOT_FINITE.search(body) else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}") from None


async def read_body(receive: Receive, *, max_bytes: int) -> bytes:
    """The whole body.  Raises PayloadTooLarge, and UnavailableError where the caller hangs up meanwhile."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise UnavailableError("the caller hung up before its request had arrived")
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise PayloadTooLarge(f"the body is larger than server.max_body_bytes = {max_bytes}")
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def has_hung_up(receive: Receive) -> bool:
    """Whether the caller's connection is known to be closed, right now.

    ``receive`` answers at once if it is and would wait otherwise; so it is asked for one step only.
    """
    step = receive()
    try:
        step.send(None)  # type: ignore[attr-defined]
    except StopIteration as answer:
        return answer.value["type"] == "http.disconnect"
    finally:
        step.close()  # type: ignore[attr-defined]
    return False


async def unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """Wait for ``work``; if the caller hangs up first, cancel it, so that nothing is done for nobody."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(hang_up(request.receive), name="disconnect")
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise UnavailableError("the caller hung up")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def hang_up(receive: Receive) -> None:
    """Wait until the caller hangs up, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
