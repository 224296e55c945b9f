"""``/api/variants``: the versions of agents at work, and their labels' shares of the training groups."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from wingbeat.core.protocol_variants import ReleaseReply, ReleaseRequest, VariantsReply, VariantsRequest
from wingbeat.core.types import Variant
from wingbeat.dataflow.variants import Asker
from wingbeat.server.control import Control
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.keys.principals import MAY_ADMINISTRATE, MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing


def variant_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes, bound to one control."""
    router = APIRouter(prefix="/api", tags=["variants"])
    changing = asyncio.Lock()
    """Held while weights change: what is on disk must be what the last of several changes set."""

    @router.get("/variants")
    async def variants(request: Request) -> VariantsReply:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return control.variants.reply()

    @router.put("/variants", openapi_extra=body_schema(VariantsRequest))
    async def set_weights(request: Request) -> VariantsReply:
        keys.require(request.headers, MAY_ADMINISTRATE)
        wanted = parse(VariantsRequest, await request.body())
        async with changing:
            control.variants.mix.set_weights(wanted.weights)
            await asyncio.to_thread(control.variants.save)
        control.events.emit("variants", weights=control.variants.mix.weights)
        control.changed.notify()
        return control.variants.reply()

    @router.post("/tasks/release", openapi_extra=body_schema(ReleaseRequest))
    async def release(request: Request) -> ReleaseReply:
        principal = keys.require(request.headers, MAY_RUN_AGENTS)
        wanted = parse(ReleaseRequest, await request.body())
        client = principal.client(wanted.client_id)
        leaver = Asker(wanted.instance or client, Variant(wanted.label, wanted.code)) if wanted.leaving else None
        released = control.rollouts.release(wanted.lease_ids, client=client, leaver=leaver)
        if leaver is not None:
            control.variants.left(leaver)
        return ReleaseReply(released=released)

    return router
