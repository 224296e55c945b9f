"""The ASGI application of control: routes, one table from errors to answers, body limits."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from wingbeat.core.errors import OverloadedError, PayloadTooLarge, PermissionDenied, WingbeatError
from wingbeat.server.control import Control
from wingbeat.server.keys import RoleKeys
from wingbeat.server.responses import error_response
from wingbeat.server.routes_chat import chat_routes
from wingbeat.server.routes_episodes import episode_routes, run_routes

logger = logging.getLogger(__name__)


def create_app(control: Control, keys: RoleKeys) -> FastAPI:
    """The application; entering its lifespan starts control, leaving it stops control."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with control:
            yield

    app = FastAPI(title="Wingbeat", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(chat_routes(control))
    app.include_router(episode_routes(control, keys))
    app.include_router(run_routes(control, keys))

    @app.websocket("/worker/v1")
    async def worker(socket: WebSocket) -> None:
        await control.hub.serve(socket)

    app.add_exception_handler(WingbeatError, _wingbeat_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(OwnOrigin)
    app.add_middleware(BodyLimit, max_bytes=control.config.server.max_body_bytes)
    return app


async def _wingbeat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WingbeatError)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = f"{max(1, round(error.retry_after_s))}"
    elif error.status == 503:
        headers["retry-after"] = "1"
    return error_response(error, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    own = WingbeatError(f"{request.method} {request.url.path}: {error.detail}")
    own.status = error.status_code
    own.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return error_response(own)


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.exception("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
    own = WingbeatError(f"unexpected {type(error).__name__} in the server; its log has the details")
    return error_response(own)


class OwnOrigin:
    """Refuses requests that a web page of another origin sends: on loopback no key would stop them.

    Browsers name the page's origin in every cross-origin request that may change something; agents and
    SDKs send none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            origin = headers.get(b"origin")
            if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
                refusal = PermissionDenied(f"requests from the web page {origin.decode('latin-1')} are not accepted")
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses request bodies above a size, whether declared or streamed."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = PayloadTooLarge(f"the body is larger than server.max_body_bytes = {self._max_bytes}")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(too_large)(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._max_bytes:
                    raise too_large
            return message

        await self._app(scope, limited, send)
