"""What requests of a resources server say, and how they are answered: parsing, errors, long bodies."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from wingbeat.core.errors import ConfigError, RequestError, WingbeatError
from wingbeat.core.protocol import Wire
from wingbeat.resources import ResourceLost
from wingbeat.server.http.error_answers import http_fault
from wingbeat.server.http.request_limits import BODY_HOLD
from wingbeat.server.http.requests import LONG_BODY_BYTES, decode_json, is_long

M = TypeVar("M", bound=Wire)
T = TypeVar("T")

FILE_FAULTS: Mapping[type[OSError], tuple[int, str]] = {
    FileNotFoundError: (404, "file_not_found"),
    IsADirectoryError: (409, "is_a_directory"),
    NotADirectoryError: (409, "not_a_directory"),
    OSError: (409, "os_error"),
}
"""What a box says of its files: an observation, which the client raises again."""


async def observed(begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What a box finds of files and paths is told as what it is, and not as a fault of this server."""
    try:
        return await begin()
    except WingbeatError:
        raise
    except OSError as error:
        kind = next(kind for kind in FILE_FAULTS if isinstance(error, kind))
        status, code = FILE_FAULTS[kind]
        fault = coded(status, code, str(error))
        fault.param = errno.errorcode.get(error.errno or 0)
        raise fault from error
    except (TypeError, ValueError) as error:
        code = "invalid_value" if isinstance(error, ValueError) else "invalid_type"
        raise coded(400, code, str(error)) from error


async def in_time(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """A box ends its commands by itself; one that does not even say so would keep its client for ever."""
    scope = asyncio.timeout(limit_s)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if scope.expired():
            raise ResourceLost(f"the box did not end a command within {limit_s:g} s, nor said why") from error
        raise


def coded(status: int, code: str, text: str) -> WingbeatError:
    fault = http_fault(status, text)
    fault.code = code
    return fault


async def parsed(model: type[M], body: bytes) -> M:
    """Raises RequestError."""
    try:
        if is_long(body):
            return await asyncio.to_thread(model.model_validate_json, body)
        return model.model_validate_json(body)
    except ValidationError as error:
        decode_json(body)  # says it better where it is no JSON
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise RequestError(f"`{where}`: {fault['msg']}", param=where) from None


def query_of(request: Request, name: str) -> str:
    """As it was sent: the name of a file may be no UTF-8."""
    query = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="surrogateescape")
    value = dict(query).get(name)
    if value is None:
        raise RequestError(f"{name}: expected it in the query", param=name)
    return value


def call_id_of(text: str) -> str:
    if len(text) != 32 or any(c not in "0123456789abcdef" for c in text):
        raise RequestError("expected an id of 32 hexadecimal digits")
    return text


def json_answer(model: Wire) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


async def long_answer(model: Wire, size: int) -> Response:
    """Of many bytes in a thread: everybody else would wait meanwhile."""
    return json_answer(model) if size < LONG_BODY_BYTES else await asyncio.to_thread(json_answer, model)


def release_body(request: Request) -> None:
    """Its body counts as read, though its answer may take long."""
    hold = request.scope.get(BODY_HOLD)
    if hold is not None:
        hold.release()


def keep_body(request: Request) -> Callable[[], None]:
    """Its body counts until what is returned is called: a call has it for as long as it runs, though its caller may
    have hung up long before."""
    hold = request.scope.get(BODY_HOLD)
    return (lambda: None) if hold is None else hold.move().release


def as_answer(error: ConfigError) -> WingbeatError:
    """A spec that cannot be leased is a fault of the request, though in a process of one's own one of the setup."""
    fault = coded(400, error.code, error.message)
    fault.param = error.param
    return fault
