"""Collected conversations over HTTP: their state, their feedback, their deletion.

They share the paths of ``/api/episodes/{id}`` with episodes that somebody began; the id tells them apart.
"""

from __future__ import annotations

from itertools import islice

from fastapi import APIRouter, Request

from wingbeat.core.errors import RequestError, UnknownEpisode
from wingbeat.core.protocol import (
    AbortRequest,
    ConversationReply,
    DeletedReply,
    EpisodeReply,
    GroupModel,
    HeartbeatReply,
)
from wingbeat.core.types import Cause
from wingbeat.server.collect.ends import Target, sampled_tokens
from wingbeat.server.control import Control
from wingbeat.server.episodes.registry import EpisodeState, task_model
from wingbeat.server.http.bodies import parse
from wingbeat.server.keys.principals import MAY_COLLECT, Role
from wingbeat.server.keys.ring import KeyRing

MAX_LISTED = 1000
LISTED = 100
LIMIT = [
    {
        "name": "limit",
        "in": "query",
        "required": False,
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
    }
]


def collect_routes(control: Control, keys: KeyRing) -> APIRouter:
    """The routes that episodes do not have, bound to one control."""
    router = APIRouter(prefix="/api", tags=["conversations"])

    @router.get("/conversations", openapi_extra={"parameters": LIMIT})
    async def list_conversations(request: Request) -> list[ConversationReply]:
        caller = keys.require(request.headers, MAY_COLLECT)
        limit = _limit(request.query_params.get("limit"))
        book = control.collecting.store.book
        found = book if caller.role is Role.ADMIN else book.of_key(caller.key_id)
        newest = islice(reversed(tuple(found)), limit)
        return [
            ConversationReply(
                episode_id=one.episode_id,
                conversation_id=one.name,
                key=one.key_name,
                train=one.train,
                num_turns=one.num_turns,
                opened_s=one.opened_s,
                last_s=one.last_s,
            )
            for one in newest
        ]

    @router.delete("/episodes/{episode_id}")
    async def delete(request: Request, episode_id: str) -> DeletedReply:
        keys.require(request.headers, MAY_COLLECT)
        target = control.collecting.claim(episode_id, request.headers)
        if target is None:
            raise UnknownEpisode(f"{episode_id!r} is no collected conversation; episodes that a client began stay")
        return await control.collecting.delete(target)

    return router


def _limit(text: str | None) -> int:
    """How many to list.  Raises RequestError."""
    if text is None:
        return LISTED
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= MAX_LISTED or len(text) > 9:
        raise RequestError(f"`limit`: expected a number from 1 to {MAX_LISTED}, got {text!r:.40}", param="limit")
    return int(text)


async def conversation_state(control: Control, target: Target) -> EpisodeReply:
    """``GET /api/episodes/{id}`` of a conversation.  Raises UnknownEpisode."""
    conversation = target.conversation
    episode = await control.collecting.store.load(conversation) if conversation is not None else None
    if conversation is not None and episode is not None:
        return EpisodeReply(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            state=EpisodeState.OPEN,
            task=task_model(conversation.group),
            group=GroupModel(id=conversation.group.id, size=1),
            split=episode.split,
            policies=list(episode.policies),
            num_turns=episode.graph.num_turns,
            num_sampled_tokens=episode.graph.num_sampled_tokens,
            label="",
            client_id=conversation.key_id,
        )
    view = await control.collecting.ends.ended(target)
    return EpisodeReply(
        episode_id=view.episode_id,
        attempt=view.attempt,
        state=view.state,
        task=task_model(view.group),
        group=GroupModel(id=view.group.id, size=1),
        split=view.group.split,
        policies=list(view.group.policies),
        num_turns=0 if view.record is None else view.record.num_turns,
        num_sampled_tokens=0 if view.record is None else sampled_tokens(view.record),
        label=view.label,
        client_id=view.client,
        outcome=view.outcome,
        cause=Cause(view.cause) if view.cause else None,
        message=view.message,
    )


async def keep_alive(control: Control, target: Target) -> HeartbeatReply:
    """A heartbeat of a conversation, which needs none: it says that the conversation goes on."""
    reply = await conversation_state(control, target)
    if target.conversation is not None and not target.conversation.ended:
        control.collecting.store.book.touch(target.conversation, clock=control.clock())
    return HeartbeatReply(episode_id=reply.episode_id, state=reply.state, heartbeat_s=control.config.server.heartbeat_s)


async def abort_conversation(control: Control, target: Target, body: bytes) -> EpisodeReply:
    """Closed without a reward."""
    await control.collecting.ends.abort(target, parse(AbortRequest, body))
    return await conversation_state(control, Target(target.episode_id, target.caller, None))
