"""The run as a whole: status, policies, evaluations, events, metrics, health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from wingbeat.core.protocol import EvaluationReply, EvaluationRequest, PolicyReply, StatusReply
from wingbeat.server.bodies import body_schema, parse
from wingbeat.server.control import Control
from wingbeat.server.keys import RoleKeys
from wingbeat.server.status import policy_reply, status_reply


def run_routes(control: Control, keys: RoleKeys) -> APIRouter:
    """The run as a whole."""
    router = APIRouter(tags=["run"])

    @router.get("/api/status")
    async def status(request: Request) -> StatusReply:
        keys.require_admin(request.headers)
        return status_reply(control)

    @router.get("/api/policies")
    async def policies(request: Request) -> list[PolicyReply]:
        keys.require_admin(request.headers)
        return [policy_reply(control, host) for host in control.policies.values()]

    @router.post("/api/evaluations", openapi_extra=body_schema(EvaluationRequest))
    async def evaluate(request: Request) -> EvaluationReply:
        keys.require_admin(request.headers)
        wanted = parse(EvaluationRequest, await request.body())
        return control.evaluations.reply(control.evaluations.start(wanted))

    @router.get("/api/evaluations/{evaluation_id}")
    async def evaluation(request: Request, evaluation_id: str) -> EvaluationReply:
        keys.require_admin(request.headers)
        return control.evaluations.reply(evaluation_id)

    @router.post("/api/stop")
    async def stop(request: Request) -> dict[str, str]:
        keys.require_admin(request.headers)
        control.request_stop()
        return {"state": "stopping"}

    @router.get("/api/events")
    async def events(request: Request) -> Response:
        keys.require_admin(request.headers)
        return StreamingResponse(_follow(control), media_type="text/event-stream")

    @router.get("/metrics")
    async def metrics() -> Response:
        control.metrics.open_episodes.set(len(control.registry.open_episodes()))
        control.metrics.in_flight.set(control.engines.in_flight)
        control.metrics.engines.set(len(control.engines.links))
        control.metrics.engine_stats({link.worker_id: link.stats for link in control.engines.links})
        return Response(control.metrics.render(), media_type="text/plain; version=0.0.4")

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok" if control.error is None else "degraded"}

    return router


async def _follow(control: Control) -> AsyncIterator[bytes]:
    """Every event from now on, until the server stops or the reader leaves."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=10_000)

    def put(record: dict[str, Any]) -> None:
        if not queue.full():  # a reader that stopped reading must not fill our memory
            queue.put_nowait(record)

    unsubscribe = control.events.subscribe(put)
    try:
        yield b": following\n\n"
        while True:
            record = await queue.get()
            yield b"data: " + orjson.dumps(record) + b"\n\n"
            if record["event"] == "stopped":
                return
    finally:
        unsubscribe()
