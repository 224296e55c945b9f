"""The version of the episode contract in every exchange under ``/api`` (:mod:`wingbeat.core.negotiation`)."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wingbeat.core.errors import RequestError
from wingbeat.core.negotiation import choose_version
from wingbeat.core.protocol import PROTOCOL_HEADER, PROTOCOL_VERSIONS
from wingbeat.server.http.error_answers import error_response

_HEADER = PROTOCOL_HEADER.encode()


class ProtocolVersions:
    """Refuses clients of another version and tells the others which one is spoken."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/api/"):
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"").decode("latin-1")
        try:
            version = choose_version(given)
        except RequestError as refusal:
            answer = error_response(refusal)
            answer.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSIONS[1])
            await answer(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[PROTOCOL_HEADER] = str(version)
            await send(message)

        await self._app(scope, receive, told)
