"""The run as a whole: status, policies, evaluations, events, metrics, health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from wingbeat.core.protocol import EvaluationReply, EvaluationRequest, PolicyReply, StatusReply
from wingbeat.server.control import Control
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.keys.principals import MAY_ADMINISTRATE, MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.status import policy_reply, status_reply

CHECK_KEY_EVERY_S = 1.0
"""How long a reader of events can stay at most once its key was revoked, in a run in which nothing happens."""


def run_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The run as a whole."""
    router = APIRouter(tags=["run"])

    @router.get("/api/status")
    async def status(request: Request) -> StatusReply:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return status_reply(control)

    @router.get("/api/policies")
    async def policies(request: Request) -> list[PolicyReply]:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return [policy_reply(control, host) for host in control.policies.values()]

    @router.post("/api/evaluations", openapi_extra=body_schema(EvaluationRequest))
    async def evaluate(request: Request) -> EvaluationReply:
        keys.require(request.headers, MAY_ADMINISTRATE)
        wanted = parse(EvaluationRequest, await request.body())
        return control.evaluations.reply(control.evaluations.start(wanted))

    @router.get("/api/evaluations/{evaluation_id}")
    async def evaluation(request: Request, evaluation_id: str) -> EvaluationReply:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return control.evaluations.reply(evaluation_id)

    @router.post("/api/stop")
    async def stop(request: Request) -> dict[str, str]:
        keys.require(request.headers, MAY_ADMINISTRATE)
        control.request_stop()
        return {"state": "stopping"}

    @router.get("/api/events")
    async def events(request: Request) -> Response:
        keys.require(request.headers, MAY_ADMINISTRATE)
        events = _follow(control, is_welcome=lambda: keys.is_admin(request.headers))
        return StreamingResponse(events, media_type="text/event-stream")

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        if not (keys.is_open or control.config.server.open_metrics):
            keys.require(request.headers, MAY_RUN_AGENTS)
        control.metrics.open_episodes.set(len(control.registry.open_episodes()))
        control.collecting.measure()
        control.metrics.in_flight.set(control.engines.in_flight)
        control.metrics.waiting.set(control.engines.waiting)
        control.metrics.leases.set(control.rollouts.num_leased)
        control.metrics.of_engines.measure(control.engines)
        return Response(control.metrics.render(), media_type="text/plain; version=0.0.4")

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok" if control.error is None else "degraded"}

    return router


async def _follow(control: Control, *, is_welcome: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Every event from now on, until the server stops, the reader leaves or its key is no longer good."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=10_000)

    def put(record: dict[str, Any]) -> None:
        if not queue.full():  # a reader that stopped reading must not fill our memory
            queue.put_nowait(record)

    unsubscribe = control.events.subscribe(put)
    try:
        yield b": following\n\n"
        while is_welcome():
            try:
                async with asyncio.timeout(CHECK_KEY_EVERY_S):
                    record = await queue.get()
            except TimeoutError:
                continue
            yield b"data: " + orjson.dumps(record) + b"\n\n"
            if record["event"] == "stopped":
                return
    finally:
        unsubscribe()
