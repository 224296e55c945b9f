"""HTTP to a resources server: one session, retries in this one layer, and its errors as what they are here.

Every call may be sent again: leases and calls are named by ids that the server remembers.
"""

from __future__ import annotations

import ast
import asyncio
import errno
import os
import random
import re
import time
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

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
LONG_BYTES = 256 * 1024
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
        """Raises ConfigError for what is no address, or no key."""
        _check_address(url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("key: expected one as `wingbeat keys create` prints it, got other characters")
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

        ``budget_s``: within which another try may begin, from the first failure (None: the connection's own).
        """
        headers = dict(self._headers)
        if body is not None:
            data = body.model_dump_json().encode()
            headers["Content-Type"] = "application/json"
        budget_s = self._retry_budget_s if budget_s is None else budget_s
        failed_at, tries = 0.0, 0
        while True:
            began = time.monotonic()
            answer, fault, pause_s = await self._try(method, path, data, query, headers, timeout_s)
            if fault is None:
                return answer
            if pause_s is None:
                raise fault
            tries += 1
            if not failed_at:  # an answer that came to nothing may have been waited for much longer than a break lasts
                now = time.monotonic()
                failed_at = now if now - began < timeout_s else began
            pause_s = max(pause_s, random.random() * min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(tries, 16)))
            if time.monotonic() - failed_at + pause_s > budget_s:
                raise fault
            await asyncio.sleep(pause_s)

    async def read(self, model: type[M], method: str, path: str, body: Wire | None = None, **more: Any) -> M:
        """As :meth:`send`, parsed; unknown keys are ignored."""
        return await self.parsed(model, await self.send(method, path, body, **more), where=f"{method} {path}")

    async def parsed(self, model: type[M], data: bytes, *, where: str) -> M:
        """What an answer says; a long one is read in a thread.  Raises ResourceFailed."""

        def parse() -> M:
            return model.model_validate_json(data, extra="ignore")

        try:
            return parse() if len(data) < LONG_BYTES else await asyncio.to_thread(parse)
        except ValidationError as error:
            raise ResourceFailed(
                f"{where}: expected a {model.__name__} of a Wingbeat resources server at {self.url}, got"
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
    ) -> tuple[bytes, Fault | None, float | None]:
        """The answer, or the fault and after how many seconds to try again (None: never)."""
        try:
            async with self._open().request(
                method,
                f"{self.url}{PREFIX}{path}{_query(query)}",
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                found = await response.read()
        except _FAILURES as error:
            refused = certificate_fault(error)
            if refused:
                return b"", ConfigError(f"the certificate of {self.url} is not accepted: {refused}"), None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            words = f"{method} {path}: no answer of the resources server at {self.url}: {' '.join(reason.split())}"
            return b"", Unreachable(f"{words}; is `wingbeat resources` running there?"), 0.0
        if response.status < 300:
            return found, None, None
        if response.status < 400:
            where = urlsplit(response.headers.get("Location", "")).netloc or "another path"
            words = f"{self.url} leads elsewhere ({where}), and redirects are not followed: name that address itself"
            return b"", ConfigError(words), None
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


Fault = WingbeatError | OSError | ValueError | TypeError


def fault_of(status: int, body: bytes, *, where: str) -> Fault:
    """What an answer stands for."""
    try:
        error = orjson.loads(body)["error"]
        code, text, param = str(error["code"]), str(error["message"]), error.get("param")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ResourceFailed(f"{where}: expected an answer of a Wingbeat resources server, got HTTP {status}")
    if code == "unsupported_field" and param:
        kind = text.partition("resource kind '")[2].partition("'")[0]
        return UnsupportedField(kind, str(param), text.partition(" is not supported; ")[2] or text)
    if code in _OF_FILES:
        return _os_error(_OF_FILES[code], text, str(param or ""))
    if code in _BY_CODE:
        return _BY_CODE[code](text)
    kinds = _BY_STATUS.get(status, ResourceFailed)
    if kinds is LimitReached:
        return LimitReached(text)
    if kinds is AuthenticationError:
        text = f"{text}; for resources, RemoteResources(url, key=KEY), or WINGBEAT_KEY_RESOURCES for rollout"
    if status in (404, 405):
        text = f"{where}: {text}; is that the address of `wingbeat resources`, of the same release?"
    return kinds(text, param=param)


def _os_error(kind: type[OSError], text: str, name: str) -> OSError:
    """As the system raised it there: with this system's number of that name, and the path."""
    parts = re.fullmatch(r"\[Errno \d+\] (.+?)(?:: (['\"].*['\"]))?", text, re.DOTALL)
    number = getattr(errno, name, None) if re.fullmatch(r"E[A-Z0-9]+", name) else None
    if parts is None or not isinstance(number, int):
        return kind(text)
    if parts[2] is None:
        return OSError(number, parts[1])
    try:
        return OSError(number, parts[1], ast.literal_eval(parts[2]))
    except (SyntaxError, ValueError):
        return kind(text)


def _query(query: Mapping[str, str] | None) -> str:
    """A path may be no UTF-8, as names of files are."""
    return f"?{urlencode(query, errors='surrogateescape')}" if query else ""


def _check_address(url: str) -> None:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address, parts = False, urlsplit("")
    if not is_address or parts.username is not None or parts.query or parts.fragment or any(c.isspace() for c in url):
        raise ConfigError(
            f"url: expected the address of a resources server, as http://HOST:8322 (a key is given as key), got"
            f" {url.rpartition('@')[2]!r}"
        )


_OF_FILES: Mapping[str, type[OSError]] = {
    "file_not_found": FileNotFoundError,
    "is_a_directory": IsADirectoryError,
    "not_a_directory": NotADirectoryError,
    "os_error": OSError,
}
_BY_CODE: Mapping[str, type[WingbeatError] | type[ValueError] | type[TypeError]] = {
    "resource_failed": ResourceFailed,
    "resource_lost": ResourceLost,
    "resource_wait": ResourceWait,
    "config_error": ConfigError,
    "invalid_value": ValueError,
    "invalid_type": TypeError,
}
_BY_STATUS: Mapping[int, type[WingbeatError]] = {
    400: RequestError,
    401: AuthenticationError,
    403: PermissionDenied,
    413: PayloadTooLarge,
    429: LimitReached,
}
