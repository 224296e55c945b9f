"""The ASGI application of control: routes, one table from errors to answers, body limits."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from wingbeat.core.errors import PayloadTooLarge, UnavailableError, WingbeatError
from wingbeat.server.calls.routes import ROUTES, ModelCalls, base_url_hint, dialect_of, without_key
from wingbeat.server.collect.routes import collect_routes
from wingbeat.server.control import Control
from wingbeat.server.http.error_answers import error_headers, error_response, http_fault
from wingbeat.server.http.guard import Guard
from wingbeat.server.http.openapi import describe
from wingbeat.server.http.protocol_versions import ProtocolVersions
from wingbeat.server.http.request_limits import RequestLimits, callers_of
from wingbeat.server.http.routes_deployment import deployment_routes
from wingbeat.server.http.routes_episodes import episode_routes
from wingbeat.server.http.routes_run import run_routes
from wingbeat.server.http.routes_tasks import task_routes
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.keys.routes import key_routes
from wingbeat.server.resources.report_routes import resource_report_routes
from wingbeat.server.teams.routes import team_routes
from wingbeat.server.variants.routes import variant_routes
from wingbeat.server.weights.routes import weight_routes
from wingbeat.server.workers.routes import worker_routes

logger = logging.getLogger(__name__)


def create_app(control: Control, keys: KeyRing) -> ASGIApp:
    """The application; entering its lifespan starts control, leaving it stops control.

    Model calls are served in front of everything else.
    """
    app = Guard(
        ModelCalls(control, RequestLimits(control.limits, callers_of(control, keys), _api(control, keys))),
        keys,
        allowed_hosts=control.config.server.allowed_hosts,
    )
    return ServerErrorMiddleware(app, handler=_unexpected_call)


def _api(control: Control, keys: KeyRing) -> FastAPI:
    """``/api``, the workers' endpoint and the rest."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with control:
            yield

    app = FastAPI(title="Wingbeat", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(episode_routes(control, keys))
    app.include_router(task_routes(control, keys))
    app.include_router(run_routes(control, keys))
    app.include_router(variant_routes(control, keys))
    app.include_router(weight_routes(control, keys))
    app.include_router(key_routes(keys))
    app.include_router(collect_routes(control, keys))
    app.include_router(team_routes(control, keys))
    app.include_router(worker_routes(control, keys))
    app.include_router(deployment_routes(control, keys))
    app.include_router(resource_report_routes(control, keys))

    @app.websocket("/worker/v1")
    async def worker(socket: WebSocket) -> None:
        await control.hub.serve(socket)

    app.add_exception_handler(WingbeatError, _wingbeat_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _hung_up)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(ProtocolVersions)
    app.openapi = lambda: describe(app, ROUTES)  # type: ignore[method-assign]
    app.add_middleware(BodyLimit, max_bytes=control.config.server.max_body_bytes)
    return app


async def _wingbeat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WingbeatError)
    return error_response(error, error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    hint = base_url_hint(path) if error.status_code == 404 else ""
    own = http_fault(error.status_code, f"{request.method} {without_key(path)}: {error.detail}{hint}")
    return Response(dialect_of(path).error(own), own.status, error.headers, media_type="application/json")


async def _hung_up(request: Request, error: Exception) -> Response:
    """Nobody reads this; without it the log would have a traceback for every caller that leaves."""
    return error_response(UnavailableError("the caller hung up before its request had arrived"))


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(_logged(request, error))


async def _unexpected_call(request: Request, error: Exception) -> Response:
    """As the SDK of that path reads errors."""
    own = _logged(request, error)
    return Response(dialect_of(request.url.path).error(own), own.status, media_type="application/json")


def _logged(request: Request, error: Exception) -> WingbeatError:
    logger.exception("unexpected error in %s %s", request.method, without_key(request.url.path), exc_info=error)
    return WingbeatError(f"unexpected {type(error).__name__} in the server; its log has the details")


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
