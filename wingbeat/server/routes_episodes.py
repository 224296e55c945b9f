"""``/api``: tasks, episodes, evaluations, status (DESIGN: "Episodes over HTTP")."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError

from wingbeat.core.errors import InvalidReward, RequestError
from wingbeat.core.protocol import (
    AbortRequest,
    BeginReply,
    BeginRequest,
    EpisodeReply,
    EvaluationReply,
    EvaluationRequest,
    FinishReply,
    FinishRequest,
    GroupModel,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    MixingReply,
    MixingRequest,
    PolicyReply,
    RemovedSourceReply,
    Rewards,
    SourceReply,
    StatusReply,
    TaskModel,
    TaskSourceReply,
    TaskSourceRequest,
    Wire,
)
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.task_sources import check_source
from wingbeat.server.control import Control
from wingbeat.server.episodes import OpenEpisode, task_model
from wingbeat.server.keys import RoleKeys
from wingbeat.server.requests import decode_json, unless_gone
from wingbeat.server.sources import SavedSource, delete_source, save_source
from wingbeat.server.status import policy_reply, status_reply
from wingbeat.server.suggestions import did_you_mean

M = TypeVar("M", bound=Wire)

NESTED: Mapping[str, type[Wire]] = {"task": TaskModel, "tasks": TaskModel, "group": GroupModel, "rewards": Rewards}
"""The models of fields that hold one."""


def parse(model: type[M], body: bytes) -> M:
    """Validate a body against a wire model.  Raises RequestError (InvalidReward for rewards)."""
    data = decode_json(body) if body else {}
    try:
        return model.model_validate(data)
    except ValidationError as error:
        fault = max(error.errors(), key=lambda found: len(found["loc"]))  # of a union, the member that was meant
        where = ".".join(str(part) for part in fault["loc"] if part not in ("float", "constrained-float", "Rewards"))
        kind = InvalidReward if where.startswith("rewards") else RequestError
        if fault["type"] == "extra_forbidden":
            raise kind(f"`{where}`: {_unknown_field(model, fault['loc'], fault['input'])}", param=where) from None
        raise kind(f"`{where}`: {fault['msg']}, got {fault.get('input')!r:.200}", param=where) from None


def _unknown_field(model: type[Wire], where: tuple[int | str, ...], value: Any) -> str:
    """What to write instead of a field that the model does not have."""
    owner = next((NESTED[part] for part in reversed(where[:-1]) if isinstance(part, str) and part in NESTED), model)
    name = str(where[-1])
    if owner is Rewards and isinstance(value, int | float):
        section = "agents" if ":" in name else "policies"
        example = orjson.dumps({section: {name: value}}).decode()
        return f"unknown field; the reward of one of several policies or agents goes into `{section}`: {example}"
    hint = did_you_mean(name, owner.model_fields) or f"known are {', '.join(owner.model_fields)}"
    return f"unknown field; {hint}"


def episode_routes(control: Control, keys: RoleKeys) -> APIRouter:
    """The routes, bound to one control.  Bodies are read raw, so that one parser gives one error shape."""
    router = APIRouter(prefix="/api", tags=["episodes"])
    changing = asyncio.Lock()
    """Held while a source comes or goes: what is on disk must be what the last of several changes left."""

    @router.put("/tasks/{source:path}", openapi_extra=body_schema(TaskSourceRequest))
    async def put_tasks(request: Request, source: str) -> TaskSourceReply:
        keys.require_admin(request.headers)
        wanted = parse(TaskSourceRequest, await request.body())
        tasks = [
            Task(t.source if "source" in t.model_fields_set else source, id=t.id, payload=t.payload)
            for t in wanted.tasks
        ]
        async with changing:
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
        keys.require_admin(request.headers)
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
        keys.require_admin(request.headers)
        wanted = parse(LeaseRequest, await request.body())
        return await unless_gone(request, control.rollouts.lease(wanted))

    @router.post("/episodes", openapi_extra=body_schema(BeginRequest))
    async def begin(request: Request) -> BeginReply:
        keys.require_admin(request.headers)
        wanted = parse(BeginRequest, await request.body())
        if (wanted.lease_id is None) == (wanted.task is None):
            raise RequestError("send exactly one of `lease_id` and `task`", param="lease_id")
        base_url = f"{str(request.base_url).rstrip('/')}/v1"
        return await unless_gone(request, control.rollouts.begin(wanted, base_url=base_url))

    @router.get("/episodes/{episode_id}")
    async def get_episode(request: Request, episode_id: str) -> EpisodeReply:
        return _episode_reply(control.registry.by_id(episode_id, request.headers))

    @router.post("/episodes/{episode_id}/heartbeat")
    async def heartbeat(request: Request, episode_id: str) -> HeartbeatReply:
        episode = control.registry.by_id(episode_id, request.headers)
        episode.last_seen = control.clock()
        episode.has_heartbeat = True
        return HeartbeatReply(episode_id=episode_id, state=episode.state, heartbeat_s=control.config.server.heartbeat_s)

    @router.post("/episodes/{episode_id}/finish", openapi_extra=body_schema(FinishRequest))
    async def finish(request: Request, episode_id: str) -> FinishReply:
        episode = control.registry.by_id(episode_id, request.headers)
        return await control.finishing.finish(episode, parse(FinishRequest, await request.body()))

    @router.post("/episodes/{episode_id}/abort", openapi_extra=body_schema(AbortRequest))
    async def abort(request: Request, episode_id: str) -> EpisodeReply:
        episode = control.registry.by_id(episode_id, request.headers)
        control.finishing.abort(episode, parse(AbortRequest, await request.body()))
        return _episode_reply(episode)

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


def run_routes(control: Control, keys: RoleKeys) -> APIRouter:
    """The run as a whole."""
    router = APIRouter(tags=["run"])

    @router.get("/api/mixing")
    async def mixing(request: Request) -> MixingReply:
        keys.require_admin(request.headers)
        return _mixing_reply(control)

    @router.put("/api/mixing", openapi_extra=body_schema(MixingRequest))
    async def set_mixing(request: Request) -> MixingReply:
        keys.require_admin(request.headers)
        wanted = parse(MixingRequest, await request.body())
        control.dealer.set_ratios(wanted.ratios)
        await asyncio.wrap_future(control.ledger.save_dealer_state(control.dealer.state_dict()))
        control.events.emit("mixing", ratios=control.dealer.ratios)
        control.changed.notify()
        return _mixing_reply(control)

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


def body_schema(model: type[Wire]) -> dict[str, Any]:
    """The OpenAPI description of a body that the route parses itself."""
    schema = model.model_json_schema()
    schema = _without_references(schema, schema.pop("$defs", {}))
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def _without_references(node: Any, definitions: dict[str, Any]) -> Any:
    """The schema with every definition written out: the description's own list holds only what is answered."""
    if isinstance(node, list):
        return [_without_references(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        node = target | {key: value for key, value in node.items() if key != "$ref"}
    return {key: _without_references(value, definitions) for key, value in node.items()}


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


def _episode_reply(episode: OpenEpisode) -> EpisodeReply:
    return EpisodeReply(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        state=episode.state,
        task=task_model(episode.group),
        group=GroupModel(id=episode.group.id, size=episode.group.size),
        split=episode.split,
        policies=list(episode.policies),
        num_turns=episode.finish_reply.num_turns if episode.finish_reply else episode.graph.num_turns,
        num_sampled_tokens=episode.finish_reply.num_sampled_tokens
        if episode.finish_reply
        else episode.graph.num_sampled_tokens,
        label=episode.label,
        outcome=episode.outcome,
    )
