"""One HTTP request to an operator's address: what it may ask for, and what came of it.

The address comes from a spec, never from an agent; a path cannot leave what the address begins with, redirects are not
followed (one could lead into the network of whoever runs this), and neither key nor host can be set by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import orjson

from wingbeat.core.errors import RequestError
from wingbeat.core.tls import CA_VARIABLE, certificate_fault, client_context
from wingbeat.resources.specs import ResourceFailed

MAX_REPLY_BYTES = 32 * 1024 * 1024
MAX_WORDS = 300
"""Characters of an answer that an error quotes."""
MAX_RETRY_AFTER_S = 3600.0
REPEATABLE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
OWN_HEADERS = frozenset({"authorization", "host", "cookie", "content-length", "transfer-encoding", "connection"})
"""What a caller may not set."""
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""A token (RFC 9110, 5.6.2): ``Host:x`` would be read as another header than it is checked as."""
HTTP_TOO_MANY = 429
HTTP_NOT_NOW = 503


class Ending(Enum):
    """How a try ended."""

    ANSWERED = "answered"
    NOT_SENT = "not_sent"
    """No connection: the other side cannot have acted."""
    NOT_NOW = "not_now"
    """Refused for now (429, or 503 with Retry-After): it has not acted."""
    FAULT = "fault"
    """No answer, or a fault of the other side (5xx): it may have acted, as may what is behind a proxy that says 503."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What an endpoint answered."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = field(repr=False)
    url: str = ""
    """Of the endpoint that answered, without the path."""

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Raises ResourceFailed for what is no JSON: the other side is not what it should be."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise ResourceFailed(f"{self.url}: expected JSON, got {excerpt(self.body)!r}") from error


@dataclass(frozen=True, slots=True)
class Try:
    """What came of one request."""

    ending: Ending
    reply: HttpReply | None = None
    words: str = ""
    """Why there is no answer to hand on."""
    retry_after_s: float | None = None
    """How long it asked to be left alone."""

    @property
    def is_throttled(self) -> bool:
        """The address is well, and asks to be left alone."""
        return self.retry_after_s is not None or (self.reply is not None and self.reply.status == HTTP_TOO_MANY)


@dataclass(frozen=True, slots=True)
class Message:
    """A request before it has an address; made by :func:`message`, which checks it."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def where(self) -> str:
        """For messages: a query may hold what is nobody's business."""
        return f"{self.method} {self.path.partition('?')[0]}"


def message(method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None) -> Message:
    """Raises RequestError for what a caller may not ask for."""
    if not (method.isascii() and method.isalpha()):
        raise RequestError(f"method: expected an HTTP method, got {method!r}", param="method")
    has_control = any(ord(c) < 33 or ord(c) == 127 or c == "#" for c in path)
    parts = unquote(path.partition("?")[0]).replace("\\", "/").split("/")
    segments = [part.partition(";")[0] for part in parts]  # some servers drop what follows before they look
    if not path.startswith("/") or path.startswith("//") or has_control or ".." in segments or "." in segments:
        raise RequestError(
            f"path: expected one below the endpoint's address, such as /chat/completions, got {path!r}", param="path"
        )
    given = dict(headers or {})
    forbidden = sorted(name for name in given if name.strip().lower() in OWN_HEADERS)
    if forbidden:
        raise RequestError(f"headers: {', '.join(forbidden)} cannot be set by the caller", param="headers")
    if any(not HEADER_NAME.fullmatch(name) or any(c in value for c in "\r\n\0") for name, value in given.items()):
        raise RequestError("headers: expected names as HTTP has them, and values of one line", param="headers")
    if json is None:
        return Message(method.upper(), path, None, given)
    try:
        body = orjson.dumps(json)
    except TypeError as error:
        raise RequestError(f"json: expected JSON data: {error}", param="json") from error
    return Message(method.upper(), path, body, {"Content-Type": "application/json", **given})


class HttpClient:
    """The connections of one pool of endpoints; of one event loop."""

    def __init__(self, *, key: str, timeout_s: float, tls: bool) -> None:
        """``tls``: whether an address begins with https."""
        self._key = key
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ResourceFailed("the endpoint is closed; lease it again")
        if self._session is None:
            # no limit: `max_concurrent` is one.  No proxy of the environment, no cookies.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=client_context() if self._tls else True)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def close(self) -> None:
        """Twice is harmless."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, message: Message, url: str) -> Try:
        """One try."""
        headers = dict(message.headers)
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with self._open().request(
                message.method,
                url.rstrip("/") + message.path,
                data=message.body,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                body = await _limited(response)
                reply = HttpReply(response.status, {k.lower(): v for k, v in response.headers.items()}, body, url)
        except aiohttp.ClientConnectorError as error:
            refused = certificate_fault(error)
            if refused:
                raise ResourceFailed(
                    f"the certificate of {url} is not accepted: {refused}; {CA_VARIABLE} names a file"
                    " with those that vouch for it"
                ) from error
            return Try(Ending.NOT_SENT, words=f"{url}: {_reason(error)}")
        except TimeoutError:
            return Try(Ending.FAULT, words=f"{url}: no answer within {self._timeout.total} s")
        except (aiohttp.ClientError, OSError) as error:
            return Try(Ending.FAULT, words=f"{url}: {_reason(error)}")
        return self._judge(reply)

    def _judge(self, reply: HttpReply) -> Try:
        if reply.status >= 400 and self._key:  # some servers quote the key that they refuse
            reply = replace(reply, body=reply.body.replace(self._key.encode(), b"***"))
        words = f"{reply.url}: HTTP {reply.status} {excerpt(reply.body)}".rstrip()
        if len(reply.body) > MAX_REPLY_BYTES:
            raise ResourceFailed(
                f"{reply.url}: expected an answer of at most {MAX_REPLY_BYTES} bytes, got a larger one"
            )
        if 300 <= reply.status < 400:
            where = urlsplit(reply.headers.get("location", "")).netloc
            raise ResourceFailed(
                f"{reply.url}: HTTP {reply.status} leads elsewhere ({where or 'on the same host'}), and redirects are"
                " not followed: name the address itself in the spec"
            )
        asked = retry_after(reply.headers.get("retry-after"))
        if reply.status == HTTP_TOO_MANY or (reply.status == HTTP_NOT_NOW and asked is not None):
            return Try(Ending.NOT_NOW, reply, words, asked)
        if reply.status >= 500:
            return Try(Ending.FAULT, reply, words)
        return Try(Ending.ANSWERED, reply, words)


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    """The body, or one byte more than is taken."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            response.close()
            break
    return b"".join(chunks)


def retry_after(value: str | None) -> float | None:
    """Seconds of the header; None where it is missing, or a date or nonsense."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None


def excerpt(said: bytes | str) -> str:
    """The beginning, on one line."""
    part = said[: 4 * MAX_WORDS]
    text = part if isinstance(part, str) else part.decode("utf-8", "replace")
    return " ".join(text.split())[:MAX_WORDS]


def _reason(error: BaseException) -> str:
    cause = getattr(error, "os_error", None) or error
    words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return excerpt(words)
