"""HTTP to a resources server: one session, retries in this one layer, and its errors as what they are here.

Every call may be sent again: leases and calls are named by ids that the server remembers.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import orjson
from pydantic import ValidationError

from wingbeat.core.errors import (
    AuthenticationError,
    ConfigError,
    LimitReached,
    PayloadTooLarge,
    PermissionDenied,
    RequestError,
    WingbeatError,
)
from wingbeat.core.lending_protocol import POLL_S, PREFIX
from wingbeat.core.protocol import CLIENT_HEADER, Wire
from wingbeat.core.tls import certificate_fault, client_context
from wingbeat.resources.specs import ResourceFailed, ResourceLost, ResourceWait, UnsupportedField

M = TypeVar("M", bound=Wire)

ANSWER_S = POLL_S + 40.0
"""For one answer: what the server waits itself, and the way."""
BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


class Unreachable(ResourceFailed):
    """No answer, however often it was asked: whoever holds something there has lost it."""


class Connection:
    """To one server; of one event loop."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        client_id: str,
        retry_budget_s: float,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._retry_budget_s = retry_budget_s
        self._headers = {CLIENT_HEADER: client_id, **({"Authorization": f"Bearer {key}"} if key else {})}
        self._tls = client_context(ca) if self.url.startswith("https://") else True
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(
        self,
        method: str,
        path: str,
        body: Wire | None = None,
        *,
        data: bytes | None = None,
        query: Mapping[str, str] | None = None,
        budget_s: float | None = None,
        timeout_s: float = ANSWER_S,
    ) -> bytes:
        """The answer's bytes.  Raises the error that the server named; Unreachable once tries are over.

        ``budget_s``: within which another try may begin (None: the connection's own).
        """
        headers = dict(self._headers)
        if body is not None:
            data = body.model_dump_json().encode()
            headers["Content-Type"] = "application/json"
        budget_s = self._retry_budget_s if budget_s is None else budget_s
        began, tries = time.monotonic(), 0
        while True:
            answer, fault, pause_s = await self._try(method, path, data, query, headers, timeout_s)
            if fault is None:
                return answer
            if pause_s is None:
                raise fault
            tries += 1
            pause_s = max(pause_s, random.random() * min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(tries, 16)))
            if time.monotonic() - began + pause_s > budget_s:
                raise fault
            await asyncio.sleep(pause_s)

    async def read(self, model: type[M], method: str, path: str, body: Wire | None = None, **more: Any) -> M:
        """As :meth:`send`, parsed; unknown keys are ignored."""
        data = await self.send(method, path, body, **more)
        try:
            return model.model_validate_json(data, extra="ignore")
        except ValidationError as error:
            raise ResourceFailed(
                f"{method} {path}: expected a {model.__name__} of a Wingbeat resources server at {self.url}, got"
                f" {error.errors()[0]['msg']}; are client and server of the same release?"
            ) from error

    async def _try(
        self,
        method: str,
        path: str,
        data: bytes | None,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> tuple[bytes, WingbeatError | OSError | ValueError | None, float | None]:
        """The answer, or the fault and after how many seconds to try again (None: never)."""
        try:
            async with self._open().request(
                method,
                self.url + PREFIX + path,
                data=data,
                params=query,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                found = await response.read()
        except _FAILURES as error:
            refused = certificate_fault(error)
            if refused:
                return b"", ConfigError(f"the certificate of {self.url} is not accepted: {refused}"), None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            words = f"{method} {path}: no answer of the resources server at {self.url}: {' '.join(reason.split())}"
            return b"", Unreachable(f"{words}; is `wingbeat resources` running there?"), 0.0
        if response.status < 400:
            return found, None, None
        fault = fault_of(response.status, found, where=f"{method} {path} at {self.url}")
        is_passing = response.status in (429, 502, 504) or (
            response.status == 503 and response.headers.get("x-should-retry") != "false"
        )
        return b"", fault, _seconds(response.headers.get("Retry-After")) if is_passing else None

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ResourceFailed("the pool is closed; no further leases")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=self._tls)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, min(60.0, float(text or 0)))
    except ValueError:
        return 1.0


def fault_of(status: int, body: bytes, *, where: str) -> WingbeatError | OSError | ValueError:
    """What an answer stands for."""
    try:
        error = orjson.loads(body)["error"]
        code, text, param = str(error["code"]), str(error["message"]), error.get("param")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ResourceFailed(f"{where}: expected an answer of a Wingbeat resources server, got HTTP {status}")
    if code == "unsupported_field" and param:
        kind = text.partition("resource kind '")[2].partition("'")[0]
        return UnsupportedField(kind, str(param), text.partition(" is not supported; ")[2] or text)
    if code in _BY_CODE:
        return _BY_CODE[code](text)
    kinds = _BY_STATUS.get(status, ResourceFailed)
    return kinds(text, param=param) if kinds is not LimitReached else LimitReached(text)


_BY_CODE: Mapping[str, type[WingbeatError] | type[OSError] | type[ValueError]] = {
    "resource_failed": ResourceFailed,
    "resource_lost": ResourceLost,
    "resource_wait": ResourceWait,
    "config_error": ConfigError,
    "file_not_found": FileNotFoundError,
    "is_a_directory": IsADirectoryError,
    "not_a_directory": NotADirectoryError,
    "os_error": OSError,
    "invalid_value": ValueError,
}
_BY_STATUS: Mapping[int, type[WingbeatError]] = {
    400: RequestError,
    401: AuthenticationError,
    403: PermissionDenied,
    413: PayloadTooLarge,
    429: LimitReached,
}
