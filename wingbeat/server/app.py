"""The ASGI application of control: routes, one table from errors to answers, body limits."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from wingbeat.core.errors import PayloadTooLarge, PermissionDenied, WingbeatError
from wingbeat.server.control import Control
from wingbeat.server.error_answers import error_headers, error_response, http_fault
from wingbeat.server.keys import RoleKeys
from wingbeat.server.routes_calls import (
    ROUTES,
    ModelCalls,
    base_url_hint,
    dialect_of,
    refuse_other_origins,
    without_key,
)
from wingbeat.server.routes_episodes import episode_routes
from wingbeat.server.routes_run import run_routes
from wingbeat.server.routes_tasks import task_routes

logger = logging.getLogger(__name__)


def create_app(control: Control, keys: RoleKeys) -> ASGIApp:
    """The application; entering its lifespan starts control, leaving it stops control.

    Model calls are served in front of everything else.
    """
    return ServerErrorMiddleware(ModelCalls(control, _api(control, keys)), handler=_unexpected_call)


def _api(control: Control, keys: RoleKeys) -> FastAPI:
    """``/api``, the workers' endpoint and the rest."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with control:
            yield

    app = FastAPI(title="Wingbeat", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(episode_routes(control, keys))
    app.include_router(task_routes(control, keys))
    app.include_router(run_routes(control, keys))

    @app.websocket("/worker/v1")
    async def worker(socket: WebSocket) -> None:
        await control.hub.serve(socket)

    app.add_exception_handler(WingbeatError, _wingbeat_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(OwnOrigin)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    app.add_middleware(BodyLimit, max_bytes=control.config.server.max_body_bytes)
    return app


def _described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description, with the model calls that are served in front of this application."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for route in ROUTES:
            operation: dict[str, Any] = {"tags": ["model calls"], "summary": route.summary}
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)}", route.path)
            ]
            if route.fields:
                properties = {"type": "object", "properties": {name: {} for name in sorted(route.fields)}}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": properties}}}
            operation["responses"] = {"200": {"description": "Successful Response"}}
            schema["paths"].setdefault(route.path, {})[route.method.lower()] = operation
        app.openapi_schema = schema
    return app.openapi_schema


async def _wingbeat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WingbeatError)
    return error_response(error, error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    hint = base_url_hint(path) if error.status_code == 404 else ""
    own = http_fault(error.status_code, f"{request.method} {without_key(path)}: {error.detail}{hint}")
    return Response(dialect_of(path).error(own), own.status, error.headers, media_type="application/json")


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(_logged(request, error))


async def _unexpected_call(request: Request, error: Exception) -> Response:
    """As the SDK of that path reads errors."""
    own = _logged(request, error)
    return Response(dialect_of(request.url.path).error(own), own.status, media_type="application/json")


def _logged(request: Request, error: Exception) -> WingbeatError:
    logger.exception("unexpected error in %s %s", request.method, without_key(request.url.path), exc_info=error)
    return WingbeatError(f"unexpected {type(error).__name__} in the server; its log has the details")


class OwnOrigin:
    """Refuses requests that a web page of another origin sends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                refuse_other_origins(dict(scope["headers"]))
            except PermissionDenied as refusal:
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
