"""``/v1``: what unmodified OpenAI clients call with an episode's ``base_url`` and ``api_key``."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from wingbeat.core.errors import EpisodeClosed, RequestError, UnavailableError, UnknownPolicy, WingbeatError
from wingbeat.server import responses
from wingbeat.server.chat import HONOURED, NO_EFFECT, parse_chat
from wingbeat.server.control import Control
from wingbeat.server.episodes import EpisodeState, OpenEpisode
from wingbeat.server.gateway import Choice, Prepared

JSON = "application/json"
R = TypeVar("R")
NOT_FINITE = re.compile(rb"\b(NaN|Infinity)\b")

CHAT_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["model", "messages"],
                    "properties": {name: {} for name in sorted(HONOURED | NO_EFFECT)},
                    "description": "An OpenAI chat completion request; docs/reference/chat-fields.md lists each field.",
                }
            }
        },
    }
}


def chat_routes(control: Control) -> APIRouter:
    """The routes, bound to one control."""
    router = APIRouter(tags=["model calls"])

    @router.post("/v1/chat/completions", openapi_extra=CHAT_SCHEMA, summary="One turn of an episode")
    async def chat(request: Request) -> Response:
        episode = control.registry.by_key(request.headers)
        episode.require_open()
        episode.last_seen = control.clock()
        prepared = control.gateway.prepare(episode, parse_chat(decode_json(await request.body())))
        if prepared.call.stream:
            return StreamingResponse(
                _stream(control, episode, prepared),
                media_type="text/event-stream",
                headers={**prepared.enforced, "cache-control": "no-store"},
            )
        return await _answer(control, episode, prepared, request)

    @router.get("/v1/models", summary="The episode's policies")
    async def models(request: Request) -> dict[str, Any]:
        episode = control.registry.by_key(request.headers)
        created = int(time.time())
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": "wingbeat"} for name in episode.policies
        ]
        return {"object": "list", "data": data}

    @router.get("/v1/models/{model}", summary="One of the episode's policies")
    async def model(request: Request, model: str) -> dict[str, Any]:
        episode = control.registry.by_key(request.headers)
        if model.partition(":")[0] not in episode.policies:
            raise UnknownPolicy(f"this episode has no policy {model!r}; it has {', '.join(sorted(episode.policies))}")
        return {"id": model, "object": "model", "created": int(time.time()), "owned_by": "wingbeat"}

    return router


def decode_json(body: bytes) -> Any:
    """Raises RequestError where the body is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        hint = "; JSON knows no NaN and no Infinity: send finite numbers" if NOT_FINITE.search(body) else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}") from None


async def _answer(control: Control, episode: OpenEpisode, prepared: Prepared, request: Request) -> Response:
    """Generate and answer; a caller that hangs up aborts the generation."""
    work = asyncio.create_task(control.gateway.complete(episode, prepared), name="turn")
    episode.calls.add(work)
    try:
        choices = await unless_gone(request, work)
    except asyncio.CancelledError:
        if work.cancelled() and episode.state is not EpisodeState.OPEN:
            raise EpisodeClosed(f"episode {episode.episode_id} ended while this call ran") from None
        raise
    except BaseExceptionGroup as group:
        raise first_of(group) from None
    finally:
        episode.calls.discard(work)
        episode.last_seen = control.clock()
    return Response(responses.completion(prepared, choices), media_type=JSON, headers=prepared.enforced)


async def unless_gone(request: Request, work: Coroutine[Any, Any, R] | asyncio.Task[R]) -> R:
    """Wait for ``work``; if the caller hangs up first, cancel it, so that nothing is done for nobody."""
    task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request), name="disconnect")
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise UnavailableError("the caller hung up")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(control: Control, episode: OpenEpisode, prepared: Prepared) -> AsyncIterator[bytes]:
    """Server-sent events; the response id is the turn id of the first choice."""
    done: list[Choice] = []
    turn_id = ""
    try:
        async with aclosing(control.gateway.stream(episode, prepared)) as items:
            async for item in items:
                if not turn_id:
                    turn_id = item.turn_id
                    yield responses.first_event(prepared, turn_id)
                if isinstance(item, Choice):
                    done.append(item)
                    yield responses.choice_events(prepared, item, turn_id)
                else:
                    yield responses.delta_event(prepared, item, turn_id)
        if prepared.call.include_usage:
            yield responses.usage_event(prepared, done, turn_id)
        yield responses.DONE
    except WingbeatError as error:
        yield responses.error_event(error)
    finally:
        episode.last_seen = control.clock()


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
