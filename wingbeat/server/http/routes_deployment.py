"""``/api/deployment``: how many engines the server has, and is wanted to have."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from wingbeat.core.deployment import Wanted, read_wanted, write_wanted
from wingbeat.core.protocol_deployment import DeploymentReply, DeploymentRequest
from wingbeat.server.control import Control
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.keys.principals import MAY_ADMINISTRATE, MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing


def deployment_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes, bound to one control."""
    router = APIRouter(prefix="/api", tags=["deployment"])
    changing = asyncio.Lock()
    """What is on disk must be what the last of several changes said."""

    def configured() -> int:
        return control.config.engine.count

    def reply(wanted: Wanted | None) -> DeploymentReply:
        return DeploymentReply(
            engines=configured() if wanted is None else wanted.engines,
            connected=sorted(link.worker_id for link in control.engines.links),
        )

    @router.get("/deployment")
    async def deployment(request: Request) -> DeploymentReply:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return reply(await asyncio.to_thread(read_wanted, control.run_dir, configured=configured()))

    @router.put("/deployment", openapi_extra=body_schema(DeploymentRequest))
    async def scale(request: Request) -> DeploymentReply:
        keys.require(request.headers, MAY_ADMINISTRATE)
        engines = parse(DeploymentRequest, await request.body()).engines
        wanted = Wanted(engines=engines, configured=configured())
        async with changing:
            await asyncio.to_thread(write_wanted, control.run_dir, wanted)
        control.events.emit("scaled", engines=wanted.engines)
        return reply(wanted)

    return router
