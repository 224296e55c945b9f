"""``/api/episodes``: begin, confirm, heartbeat, finish, abort (DESIGN: "Episodes over HTTP")."""

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
from wingbeat.server.collect.routes import abort_conversation, conversation_state, keep_alive
from wingbeat.server.control import Control
from wingbeat.server.episodes.recovery import find_attempt
from wingbeat.server.episodes.registry import OpenEpisode, task_model
from wingbeat.server.http.bodies import body_schema, parse
from wingbeat.server.http.requests import unless_gone
from wingbeat.server.keys.principals import MAY_RUN_AGENTS
from wingbeat.server.keys.ring import KeyRing


def episode_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes, bound to one control.  Bodies are read raw, so that one parser gives one error shape."""
    router = APIRouter(prefix="/api", tags=["episodes"])

    @router.post("/episodes", openapi_extra=body_schema(BeginRequest))
    async def begin(request: Request) -> BeginReply:
        caller = keys.require(request.headers, MAY_RUN_AGENTS)
        wanted = parse(BeginRequest, await request.body())
        wanted = wanted.model_copy(update={"client_id": caller.client(wanted.client_id)})
        if (wanted.lease_id is None) == (wanted.task is None):
            raise RequestError("send exactly one of `lease_id` and `task`", param="lease_id")
        base_url = f"{str(request.base_url).rstrip('/')}/v1"
        return await unless_gone(request, control.rollouts.begin(wanted, base_url=base_url))

    @router.get("/episodes/{episode_id}")
    async def get_episode(request: Request, episode_id: str) -> EpisodeReply:
        if (target := control.collecting.claim(episode_id, request.headers)) is not None:
            return await conversation_state(control, target)
        return _episode_reply(find_attempt(control, episode_id, request.headers))

    @router.post("/episodes/{episode_id}/confirm")
    async def confirm(request: Request, episode_id: str) -> EpisodeReply:
        episode = find_attempt(control, episode_id, request.headers)
        await control.rollouts.begins.confirm(episode)
        return _episode_reply(episode)

    @router.post("/episodes/{episode_id}/heartbeat")
    async def heartbeat(request: Request, episode_id: str) -> HeartbeatReply:
        if (target := control.collecting.claim(episode_id, request.headers)) is not None:
            return await keep_alive(control, target)
        episode = find_attempt(control, episode_id, request.headers)
        episode.last_seen = control.clock()
        episode.has_heartbeat = True
        return HeartbeatReply(episode_id=episode_id, state=episode.state, heartbeat_s=control.config.server.heartbeat_s)

    @router.post("/episodes/{episode_id}/finish", openapi_extra=body_schema(FinishRequest))
    async def finish(request: Request, episode_id: str) -> FinishReply:
        if (target := control.collecting.claim(episode_id, request.headers)) is not None:
            return await control.collecting.ends.finish(target, parse(FinishRequest, await request.body()))
        episode = find_attempt(control, episode_id, request.headers)
        wanted = parse(FinishRequest, await request.body())
        if wanted.transaction is not None:
            return await control.teams.prepare(episode, wanted)
        return await control.finishing.finish(episode, wanted)

    @router.post("/episodes/{episode_id}/abort", openapi_extra=body_schema(AbortRequest))
    async def abort(request: Request, episode_id: str) -> EpisodeReply:
        if (target := control.collecting.claim(episode_id, request.headers)) is not None:
            return await abort_conversation(control, target, await request.body())
        episode = find_attempt(control, episode_id, request.headers)
        wanted = parse(AbortRequest, await request.body())
        if not control.rollouts.begins.withdraw(episode, wanted.message or "its client withdrew it"):
            control.finishing.abort(episode, wanted)
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
        client_id=episode.client,
        code=episode.code,
        outcome=episode.outcome,
        cause=episode.cause,
        message=episode.message,
    )
