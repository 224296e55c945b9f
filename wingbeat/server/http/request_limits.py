"""Limits on requests as such: how many there are, and how many bytes of them are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wingbeat.core.errors import AuthenticationError, PayloadTooLarge, WingbeatError
from wingbeat.core.protocol import CLIENT_HEADER, MAX_NAME
from wingbeat.server.control import Control
from wingbeat.server.http.error_answers import error_headers, error_response
from wingbeat.server.keys.ring import EPISODE_PREFIX, KeyRing, bearer, key_headers
from wingbeat.server.limits import BODY_UNIT, Quota, Rate, TooFast

BODY_HOLD = "wingbeat.body_hold"
"""Where a request has its :class:`BodyHold`, for those who are done with its body long before they answer."""
UNLIMITED = frozenset({"/healthz", "/metrics"})
"""Asked by those who watch the server, above all when it is busy."""


class Traffic(Protocol):
    """Of one server."""

    @property
    def rate(self) -> Rate:
        """Requests of each client."""
        ...

    @property
    def bodies(self) -> Quota:
        """Bytes of bodies under way."""
        ...


class BodyHold:
    """A request's body, for as long as it is received and read.  Small ones are not worth the trouble."""

    __slots__ = ("_client", "_held", "_limits")

    def __init__(self, limits: Traffic, client: str) -> None:
        self._limits = limits
        self._client = client
        self._held = 0

    def admit(self, headers: Mapping[bytes, bytes], receive: Receive) -> Receive:
        """Count the request; where its body comes from then.  Raises LimitReached, PayloadTooLarge."""
        declared = headers.get(b"content-length", b"")
        if declared.isdigit():
            size = int(declared)
            self._check_size(size)  # first: nobody pays for what is only announced
            self._limits.rate.spend(self._client, 1 + size // BODY_UNIT)
            if size > BODY_UNIT:
                self._take(size)
            return receive
        self._limits.rate.spend(self._client)
        return self._metered(receive) if b"transfer-encoding" in headers else receive

    def _metered(self, receive: Receive) -> Receive:
        """Of a body whose length nobody told."""

        async def metered() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                self._limits.rate.owe(self._client, size / BODY_UNIT)
                self._take(size)
            return message

        return metered

    def _check_size(self, size: int) -> None:
        bodies = self._limits.bodies
        if size > bodies.limit:
            raise PayloadTooLarge(f"the body has {size} bytes, more than {bodies.key} = {bodies.limit}")

    def _take(self, size: int) -> None:
        self._check_size(self._held + size)
        self._limits.bodies.take(self._client, size)
        self._held += size

    def move(self) -> BodyHold:
        """Of the same bytes, which somebody has longer than the request lasts."""
        moved = BodyHold(self._limits, self._client)
        moved._held, self._held = self._held, 0
        return moved

    def release(self) -> None:
        """It has been read; twice is harmless."""
        if self._held:
            self._limits.bodies.give(self._client, self._held)
            self._held = 0


ClientOf = Callable[[Mapping[bytes, bytes]], str]
"""Whose request it is, of its headers; "" for nobody's.  Raises AuthenticationError."""


class RequestLimits:
    """In front of everything but the model calls, which count for themselves."""

    def __init__(self, limits: Traffic, client_of: ClientOf, app: ASGIApp) -> None:
        self._limits = limits
        self._client_of = client_of
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNLIMITED:
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            client = self._client_of(headers)
        except AuthenticationError:
            client = ""  # also slows down who guesses keys
        hold = BodyHold(self._limits, client or nobody(scope))
        try:
            own = hold.admit(headers, receive)
        except WingbeatError as refusal:
            if isinstance(refusal, TooFast):
                await asyncio.sleep(refusal.pause_s)
            await error_response(refusal, error_headers(refusal))(scope, receive, send)
            return
        scope[BODY_HOLD] = hold
        try:
            await self._app(scope, own, send)
        finally:
            hold.release()


def callers_of(control: Control, keys: KeyRing) -> ClientOf:
    """Control's: an episode's client, a key of the key file, a name."""
    by_key = holders_of(keys)

    def client_of(headers: Mapping[bytes, bytes]) -> str:
        wanted = key_headers(headers)
        if bearer(wanted).startswith(EPISODE_PREFIX):
            return control.registry.by_key(wanted).client
        return by_key(headers)

    return client_of


def holders_of(keys: KeyRing) -> ClientOf:
    """A key of the key file, else what its caller calls itself."""

    def client_of(headers: Mapping[bytes, bytes]) -> str:
        name = headers.get(CLIENT_HEADER.encode(), b"").decode("latin-1")[:MAX_NAME]
        return keys.principal(key_headers(headers)).client(name)

    return client_of


def nobody(scope: Scope) -> str:
    """The account of requests that say nothing of their own: their address."""
    address = scope.get("client")
    return f"@{address[0] if address else ''}"
