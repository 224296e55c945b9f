"""What is refused before any route looks at a request: web pages, names that are not ours, compressed bodies.

A browser on this machine can reach a server on loopback, where no key protects it.  Pages of another origin say so
in ``Origin``.  A page may also come from a name of its own that it lets lead to 127.0.0.1 ("DNS rebinding"): then
the origin is right, and only ``Host`` tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from wingbeat.core.config.server import is_loopback
from wingbeat.core.errors import PermissionDenied, WingbeatError
from wingbeat.server.calls.routes import answer_error, dialect_of
from wingbeat.server.http.error_answers import http_fault
from wingbeat.server.keys.ring import KeyRing

PLAIN = (b"", b"identity")
REMEMBERED_HOSTS = 256


class Guard:
    """In front of all routes."""

    def __init__(self, app: ASGIApp, keys: KeyRing, *, allowed_hosts: Sequence[str] | None) -> None:
        self._app = app
        self._keys = keys
        self._welcome: set[bytes] = set()
        """``Host`` headers that were found good: parsing addresses would cost each request more than all the rest."""
        self._allowed = None if allowed_hosts is None else frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            refuse_other_origins(headers)
            self._check_host(headers.get(b"host", b""))
            if headers.get(b"content-encoding", b"").lower() not in PLAIN:
                raise http_fault(415, "compressed bodies are not accepted: send the body as it is")
        except WingbeatError as error:
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": error.message[:100]})
                return
            await answer_error(dialect_of(scope["path"]), error, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, host: bytes) -> None:
        """Raises the 421 of a name under which this server may not be called."""
        if host in self._welcome or (self._allowed is None and not self._keys.is_open):
            return
        name = host_name(host.decode("latin-1"))
        if not name or is_loopback(name) or name in (self._allowed or ()):
            if len(self._welcome) < REMEMBERED_HOSTS:
                self._welcome.add(host)
            return
        raise http_fault(
            421,
            f"this server may not be called as {name!r}: an admin adds the name to server.allowed_hosts"
            + (", or makes an admin key" if self._keys.is_open else ""),
        )


def host_name(host: str) -> str:
    """The name in a ``Host`` header, without its port and in lower case."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").rstrip(".").lower()


def refuse_other_origins(headers: Mapping[bytes, bytes]) -> None:
    """A web page of another origin must not call.

    Browsers name the page's origin in every cross-origin request that may change something; agents and
    SDKs send none.  Raises PermissionDenied.
    """
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
        raise PermissionDenied(f"requests from the web page {origin.decode('latin-1')} are not accepted")
