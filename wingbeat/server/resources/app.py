"""The ASGI application of a resources server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.config.server import ServerConfig
from wingbeat.core.errors import ConfigError, SetupError, UnavailableError, WingbeatError
from wingbeat.core.lending_protocol import PREFIX
from wingbeat.resources import Backends, Budgets, Resources, SandboxSpec
from wingbeat.resources.backends import default_backends
from wingbeat.resources.backends.endpoint import key_of
from wingbeat.server.http.app import BodyLimit
from wingbeat.server.http.error_answers import error_headers, error_response, http_fault
from wingbeat.server.http.guard import Guard
from wingbeat.server.http.request_limits import RequestLimits, holders_of
from wingbeat.server.keys.principals import MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.resources.exchange import as_answer
from wingbeat.server.resources.grants import Grants
from wingbeat.server.resources.limits import LendingLimits
from wingbeat.server.resources.reports import families
from wingbeat.server.resources.routes import Lending, Routes, classes_of
from wingbeat.server.resources.rules import Rules

logger = logging.getLogger(__name__)

KEYS_EVERY_S = 1.0


def budgets_of(config: ResourcesConfig) -> Budgets:
    """This machine's, where the configuration names none."""
    machine = Budgets.of_machine()
    return Budgets(
        cpus=machine.cpus if config.cpus is None else config.cpus,
        memory_mb=machine.memory_mb if config.memory_mb is None else config.memory_mb,
        gpus=machine.gpus if config.gpus is None else config.gpus,
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        cost=config.cost,
        max_idle=config.max_idle,
    )


class LendingServer:
    """A pool and those who lease from it; made in the event loop's thread, lives in the application's lifespan."""

    def __init__(
        self,
        config: ResourcesConfig,
        server: ServerConfig,
        keys: KeyRing,
        *,
        backends: Backends | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ledger = None if config.ledger is None else Path(config.ledger).expanduser()
        self._backends = default_backends() if backends is None else backends
        self.pool = Resources(
            budgets_of(config), backends=self._backends, ledger=ledger, wait_s=config.max_wait_s, clock=clock
        )
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(self.pool))
        refused = Counter(
            "wingbeat_refused", "Requests refused with 429 because of [resources].", ["limit"], registry=self._registry
        )
        self._limits = LendingLimits(config, clock=clock, refused=lambda name: refused.labels(name).inc())
        self.grants = Grants(self.pool, config, limits=self._limits, clock=clock)
        self.keys = keys
        self._config = config
        self._server = server
        rules = Rules(config, max_bytes=server.max_body_bytes)
        self._lending = Lending(self.pool, self.grants, rules, keys, config, server.max_body_bytes)

    def check(self) -> None:
        """Whether this machine has what it is to lend; else every lease would be told so.  Raises SetupError."""
        for kind in self._config.kinds:
            backend = self._backends[kind]  # imports its library
            if kind == "sandbox":
                backend.check(SandboxSpec())
        for name in self._config.key_variables:
            key_of(name, field="resources.key_variables")

    def app(self) -> ASGIApp:
        app = Starlette(
            routes=[
                *Routes(self._lending).all(),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/healthz", _healthz, methods=["GET"]),
            ],
            lifespan=self._lifespan,
            exception_handlers={
                WingbeatError: _wingbeat_error,
                HTTPException: _http_error,
                ClientDisconnect: _hung_up,
                Exception: _unexpected,
            },
        )
        bounded = BodyLimit(app, max_bytes=self._server.max_body_bytes)
        limited = RequestLimits(self._limits, holders_of(self.keys), bounded)
        return Guard(limited, self.keys, allowed_hosts=self._server.allowed_hosts)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self.pool:
            watches = [asyncio.create_task(self.grants.watch()), asyncio.create_task(self._refresh_keys())]
            try:
                yield
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)
                await self.grants.close()

    async def _refresh_keys(self) -> None:
        while True:
            await asyncio.sleep(KEYS_EVERY_S)
            self.keys.refresh()

    async def _metrics(self, request: Request) -> Response:
        if not (self.keys.is_open or self._server.open_metrics):
            self.keys.require(request.headers, MAY_RUN_AGENTS)
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")


class _PoolCollector(Collector):
    def __init__(self, pool: Resources) -> None:
        self._pool = pool

    def collect(self) -> list[Metric]:
        return families(classes_of(self._pool))


async def _healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _wingbeat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WingbeatError)
    if isinstance(error, ConfigError):
        error = as_answer(error)
    elif isinstance(error, SetupError):  # this machine lacks something: no fault of the request
        missing = UnavailableError(error.message)
        missing.code, missing.retryable = error.code, False
        error = missing
    return error_response(error, error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    hint = "" if path.startswith(PREFIX) else f"; this is a resources server, which has {PREFIX}, /healthz and /metrics"
    return error_response(http_fault(error.status_code, f"{request.method} {path}: {error.detail}{hint}"))


async def _hung_up(request: Request, error: Exception) -> Response:
    return error_response(UnavailableError("the caller hung up before its request had arrived"))


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.exception("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
    return error_response(WingbeatError(f"unexpected {type(error).__name__} in the server; its log has the details"))
