"""HTTP to the server: one shared aiohttp session, typed bodies and replies, retries in this one layer.

What is retried: connections that fail, time-outs, answers that are no HTTP, and refusals that ask to come back (429,
503 and a proxy's 502, 504).  A request that may not be repeated (``repeatable=False``) is retried only if the
server cannot have acted on it: no connection was made, or it answered with a refusal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from wingbeat.client.failures import error_from_reply, parse_retry_after
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.tls import tls_fault, tls_hint
from wingbeat.core.errors import OverloadedError, RequestError, UnavailableError, WingbeatError
from wingbeat.core.negotiation import check_answer, write_range
from wingbeat.core.protocol import CLIENT_HEADER, PROTOCOL_HEADER
from wingbeat.core.tls import client_context

logger = logging.getLogger("wingbeat.client")

R = TypeVar("R", bound=BaseModel)

_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError)
MAX_REASON = 300
"""Characters of what a failed connection says: an answer that is no HTTP is quoted in it."""
_JSON_HEADERS = {"Content-Type": "application/json", PROTOCOL_HEADER: write_range()}


@dataclass(frozen=True, slots=True)
class Call:
    """One request.  ``key`` None sends the transport's own (admin) key."""

    method: str
    path: str
    body: BaseModel | None = None
    key: str | None = None
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    repeatable: bool = True

    @property
    def where(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class _Failure:
    """A try that brought no answer."""

    error: WingbeatError
    may_have_acted: bool
    """The server may have done what was asked, so that only repeatable requests may be sent again."""
    retry_after_s: float | None = None


class Transport:
    """A session with one server.  Opens lazily on the running loop; that loop must close it."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        timeout_s: float,
        retry: RetryPolicy,
        client_id: str = "",
        ca: str | os.PathLike[str] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """``client_id``: what the server knows this client by, where its key does not say."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"expected a server URL like http://127.0.0.1:8321, got {url!r}", param="url")
        self.url = url.rstrip("/")
        self.key = key
        self.timeout_s = timeout_s
        self.retry = retry
        self._tls = client_context(ca) if parts.scheme == "https" else True
        self._rng = rng or random.Random()
        self._own_headers = {**_JSON_HEADERS, **({CLIENT_HEADER: client_id} if client_id else {})}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RequestError("this client is closed; make a new one")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=self._tls)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def close(self) -> None:
        """End all connections; twice is harmless."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, call: Call, reply: type[R]) -> R:
        """The server's parsed answer.

        Unknown keys in it are ignored, so that a newer server can say more.  Raises the error that the
        server named, UnavailableError if it could not be reached within the retry budget.
        """
        data = await self.send_unread(call)
        try:
            return reply.model_validate_json(data, extra="ignore")
        except ValidationError as error:
            first = error.errors()[0]
            raise WingbeatError(
                f"{call.where}: expected a {reply.__name__}, got one that does not validate at "
                f"{'.'.join(map(str, first['loc'])) or 'its top'} ({first['msg']}); "
                "are client and server of the same release?"
            ) from error

    async def send_unread(self, call: Call) -> bytes:
        """The answer's bytes, for calls whose success is all that matters.  Raises as :meth:`send`."""
        body = _encode(call.body)
        retry = call.retry or self.retry
        started = time.monotonic()
        attempt = 0
        was_full = False  # it answered the last try, and said no
        while True:
            result = await self._send_once(call, body)
            if isinstance(result, bytes):
                if attempt:
                    told = "%s: the server at %s takes it now" if was_full else "%s: the server at %s answers again"
                    logger.info(told, call.where, self.url)
                return result
            if not result.error.retryable or (result.may_have_acted and not call.repeatable):
                raise result.error
            elapsed_s = time.monotonic() - started
            delay = retry.delay_s(attempt, elapsed_s=elapsed_s, retry_after_s=result.retry_after_s, rng=self._rng)
            if delay is None:
                raise result.error
            if attempt == 0:
                logger.warning("%s; trying again", result.error.message)
            was_full = isinstance(result.error, OverloadedError)
            attempt += 1
            await asyncio.sleep(delay)

    async def _send_once(self, call: Call, body: bytes | None) -> bytes | _Failure:
        try:
            async with self._open().request(
                call.method,
                self.url + call.path,
                data=body,
                headers=self._headers(call.key),
                timeout=aiohttp.ClientTimeout(total=call.timeout_s or self.timeout_s),
            ) as response:
                data = await response.read()
        except aiohttp.ClientConnectorError as error:
            return _Failure(self._unreachable(call, error), may_have_acted=False)
        except _FAILURES as error:
            return _Failure(self._unreachable(call, error), may_have_acted=True)
        if response.status < 400:
            check_answer(response.headers.get(PROTOCOL_HEADER, ""), where=self.url)
            return data
        retry_after_s = parse_retry_after(response.headers.get("Retry-After"))
        error = error_from_reply(response.status, data, retry_after_s=retry_after_s, where=call.where)
        return _Failure(error, may_have_acted=response.status not in (429, 503), retry_after_s=retry_after_s)

    def _unreachable(self, call: Call, error: BaseException) -> WingbeatError:
        refused = tls_fault(self.url, error)
        if refused is not None:
            return refused
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        reason = " ".join(reason.split())[:MAX_REASON]
        return UnavailableError(
            f"{call.where}: expected a Wingbeat server at {self.url}, got {reason}; is `wingbeat serve` running there?"
            + tls_hint(self.url, error)
        )

    def _headers(self, key: str | None) -> dict[str, str]:
        key = key or self.key
        return self._own_headers if key is None else {**self._own_headers, "Authorization": f"Bearer {key}"}

    async def stream_lines(self, call: Call) -> AsyncIterator[bytes]:
        """The lines of an endless reply (server-sent events); ends when the server ends it.

        Not retried: the caller knows whether missed events matter.  Raises as :meth:`send`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=call.timeout_s or self.timeout_s)
        headers = {**self._headers(call.key), "Accept": "text/event-stream"}
        try:
            async with self._open().request(
                call.method, self.url + call.path, headers=headers, timeout=timeout
            ) as response:
                if response.status >= 400:
                    retry_after_s = parse_retry_after(response.headers.get("Retry-After"))
                    data = await response.read()
                    raise error_from_reply(response.status, data, retry_after_s=retry_after_s, where=call.where)
                async for line in response.content:
                    yield line
        except _FAILURES as error:
            raise self._unreachable(call, error) from error


def _encode(body: BaseModel | None) -> bytes | None:
    if body is None:
        return None
    try:
        return body.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise RequestError(f"expected JSON data in {type(body).__name__}: {error}") from error
