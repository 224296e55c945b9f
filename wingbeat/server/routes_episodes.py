"""``/api/episodes``: begin, heartbeat, finish, abort (DESIGN: "Episodes over HTTP")."""

from __future__ import annotations

from fastapi import APIRouter, Request

from wingbeat.core.errors import RequestError
from wingbeat.core.protocol import (
    AbortRequest,
    BeginReply,
    BeginRequest,
    EpisodeReply,
    FinishReply,
    FinishRequest,
    GroupModel,
    HeartbeatReply,
)
from wingbeat.server.bodies import body_schema, parse
from wingbeat.server.control import Control
from wingbeat.server.episodes import OpenEpisode, task_model
from wingbeat.server.keys import RoleKeys
from wingbeat.server.requests import unless_gone


def episode_routes(control: Control, keys: RoleKeys) -> APIRouter:
    """The routes, bound to one control.  Bodies are read raw, so that one parser gives one error shape."""
    router = APIRouter(prefix="/api", tags=["episodes"])

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
