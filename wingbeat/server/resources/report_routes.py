"""``/api/resources``: what pools report to control, and where resources servers are."""

from __future__ import annotations

from fastapi import APIRouter, Request

from wingbeat.core.protocol_resources import ReportReply, ResourceReport, ResourceServers
from wingbeat.core.resource_reports import REPORT_EVERY_S, ResourceStatus
from wingbeat.server.control import Control
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.keys.principals import MAY_LEND, MAY_REPORT, MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing


def resource_report_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes, bound to one control."""
    router = APIRouter(prefix="/api", tags=["resources"])

    @router.post("/resources", openapi_extra=body_schema(ResourceReport))
    async def report(request: Request) -> ReportReply:
        caller = keys.require(request.headers, MAY_REPORT)
        told = parse(ResourceReport, await request.body())
        if told.url:
            keys.require(request.headers, MAY_LEND)  # clients send their keys to where it leads
        control.metrics.pools.take(caller.key_id or caller.role, told)
        return ReportReply(report_s=REPORT_EVERY_S)

    @router.get("/resources")
    async def classes(request: Request) -> list[ResourceStatus]:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return control.metrics.pools.classes()

    @router.get("/resources/servers")
    async def servers(request: Request) -> ResourceServers:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return ResourceServers(servers=control.metrics.pools.servers())

    return router
