"""``/api/tasks`` and ``/api/mixing``: task sources, their shares, and leases."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from wingbeat.core.errors import RequestError
from wingbeat.core.protocol import (
    LeaseReply,
    LeaseRequest,
    MixingReply,
    MixingRequest,
    RemovedSourceReply,
    SourceReply,
    TaskSourceReply,
    TaskSourceRequest,
)
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.task_sources import check_source
from wingbeat.server.control import Control
from wingbeat.server.episodes.sources import SavedSource, check_room, delete_source, save_source
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.http.requests import unless_gone
from wingbeat.server.keys.principals import MAY_ADMINISTRATE, MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing


def task_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes, bound to one control."""
    router = APIRouter(prefix="/api", tags=["tasks"])
    changing = asyncio.Lock()
    """Held while a source comes or goes: what is on disk must be what the last of several changes left."""

    @router.put("/tasks/{source:path}", openapi_extra=body_schema(TaskSourceRequest))
    async def put_tasks(request: Request, source: str) -> TaskSourceReply:
        keys.require(request.headers, MAY_RUN_AGENTS)
        body = await request.body()
        wanted = parse(TaskSourceRequest, body)
        tasks = [
            Task(t.source if "source" in t.model_fields_set else source, id=t.id, payload=t.payload)
            for t in wanted.tasks
        ]
        async with changing:
            place = (source, wanted.split)
            await asyncio.to_thread(check_room, control.run_dir, place, len(body), limits=control.config.limits)
            _add_source(control, source, wanted, tasks)
            saved = SavedSource(source=source, split=wanted.split, tasks=tuple(tasks))
            await asyncio.to_thread(save_source, control.run_dir, saved)
            await asyncio.wrap_future(control.ledger.save_dealer_state(control.dealer.state_dict()))
        control.events.emit("tasks", source=source, split=wanted.split, num_tasks=len(tasks))
        control.changed.notify()
        ratio = control.dealer.ratios.get(source)
        return TaskSourceReply(source=source, split=wanted.split, num_tasks=len(tasks), ratio=ratio)

    @router.delete("/tasks/{source:path}")
    async def remove_tasks(request: Request, source: str) -> RemovedSourceReply:
        keys.require(request.headers, MAY_ADMINISTRATE)
        async with changing:
            control.dealer.remove(source)
            await asyncio.to_thread(delete_source, control.run_dir, source)
            await asyncio.wrap_future(control.ledger.save_dealer_state(control.dealer.state_dict()))
        control.evaluations.withdraw(source)
        control.events.emit("tasks_removed", source=source)
        control.changed.notify()
        still_open = sum(g.task.source == source and g.split is Split.TRAIN for g, _ in control.book.progress())
        return RemovedSourceReply(source=source, num_open_groups=still_open, ratios=control.dealer.ratios)

    @router.post("/tasks/lease", openapi_extra=body_schema(LeaseRequest))
    async def lease(request: Request) -> LeaseReply:
        caller = keys.require(request.headers, MAY_RUN_AGENTS)
        wanted = parse(LeaseRequest, await request.body())
        wanted = wanted.model_copy(update={"client_id": caller.client(wanted.client_id)})
        return await unless_gone(request, control.rollouts.lease(wanted))

    @router.get("/mixing")
    async def mixing(request: Request) -> MixingReply:
        keys.require(request.headers, MAY_RUN_AGENTS)
        return _mixing_reply(control)

    @router.put("/mixing", openapi_extra=body_schema(MixingRequest))
    async def set_mixing(request: Request) -> MixingReply:
        keys.require(request.headers, MAY_ADMINISTRATE)
        wanted = parse(MixingRequest, await request.body())
        control.dealer.set_ratios(wanted.ratios)
        await asyncio.wrap_future(control.ledger.save_dealer_state(control.dealer.state_dict()))
        control.events.emit("mixing", ratios=control.dealer.ratios)
        control.changed.notify()
        return _mixing_reply(control)

    return router


def _add_source(control: Control, source: str, wanted: TaskSourceRequest, tasks: list[Task]) -> None:
    """Into the dealer, and for training into the mix.  Raises RequestError, and then nothing has changed."""
    check_source(source, tuple(tasks))
    if wanted.split is Split.TRAIN:
        control.dealer.join(source, wanted.ratio)
    elif wanted.ratio is not None:
        raise RequestError("a `ratio` is a share of the training groups; leave it out for eval tasks", param="ratio")
    control.dealer.add_source(source, wanted.split, tasks)


def _mixing_reply(control: Control) -> MixingReply:
    places = control.dealer.places()
    sources = {
        name: SourceReply(
            ratio=place.ratio,
            num_tasks=place.num_tasks,
            epoch=place.epoch,
            position=place.position,
            exhausted=place.is_exhausted,
            groups_dealt=place.dealt,
            groups_counted=place.counted,
            share=place.share,
            ahead=place.ahead,
        )
        for name, place in places.items()
    }
    return MixingReply(ratios=control.dealer.ratios, sources=sources)
