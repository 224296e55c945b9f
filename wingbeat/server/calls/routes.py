"""``/v1``: what unmodified SDKs call with an episode's ``base_url`` and ``api_key``.

A plain ASGI application in front of the rest, because this is the hot path.  Every dialect is served by
the same code.  The key travels in a header or, for agents that cannot set one, in the path: ``/s/KEY/v1``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from wingbeat.core.errors import AuthenticationError, PayloadTooLarge, WingbeatError
from wingbeat.server.calls.dialects import chat, completions
from wingbeat.server.calls.dialects.base import Dialect
from wingbeat.server.calls.dialects.chat import CHAT
from wingbeat.server.calls.dialects.completions import COMPLETIONS
from wingbeat.server.calls.dialects.messages import MESSAGES
from wingbeat.server.calls.dialects.messages import parse as messages
from wingbeat.server.calls.dialects.responses import RESPONSES
from wingbeat.server.calls.dialects.responses import parse as responses
from wingbeat.server.calls.gateway import unknown_policy
from wingbeat.server.calls.model_call import ModelCall, Prepared
from wingbeat.server.calls.replays import Fingerprint, SeenCalls
from wingbeat.server.calls.runs import Reader, Run
from wingbeat.server.collect.calls import CollectedCall, CollectedCalls
from wingbeat.server.collect.conversation_store import let_go_if_over
from wingbeat.server.control import Control
from wingbeat.server.episodes.recovery import asked_again
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.server.http.error_answers import error_headers, http_fault
from wingbeat.server.http.request_limits import BodyHold, nobody
from wingbeat.server.http.requests import decode_json, hang_up, has_hung_up, is_long, read_body
from wingbeat.server.keys.ring import key_headers
from wingbeat.server.limits import TooFast

COUNT = "/v1/messages/count_tokens"
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    COUNT: MESSAGES,
}
MODELS = "/v1/models"
KEY_PREFIX = "/s/"

JSON = (b"content-type", b"application/json")
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))


@dataclass(frozen=True, slots=True)
class Route:
    """One path, for the reference and the OpenAPI description."""

    method: str
    path: str
    summary: str
    fields: frozenset[str] = frozenset()
    """Of the body."""


ROUTES = (
    Route("POST", "/v1/chat/completions", "One turn of an episode", chat.HONOURED | chat.NO_EFFECT),
    Route("POST", "/v1/completions", "One turn of an episode", completions.HONOURED | completions.NO_EFFECT),
    Route("POST", "/v1/responses", "One turn of an episode", responses.HONOURED | responses.NO_EFFECT),
    Route("POST", "/v1/messages", "One turn of an episode", messages.HONOURED | messages.NO_EFFECT),
    Route("POST", COUNT, "How many tokens a messages request has", messages.HONOURED | messages.NO_EFFECT),
    Route("GET", MODELS, "The episode's policies"),
    Route("GET", MODELS + "/{model}", "One of the episode's policies"),
)


def split_key(path: str) -> tuple[str, str]:
    """The key in a path, and the path without it: ``/s/KEY/v1/models`` is ``KEY`` and ``/v1/models``."""
    if not path.startswith(KEY_PREFIX):
        return "", path
    key, slash, rest = path.removeprefix(KEY_PREFIX).partition("/")
    return key, slash + rest


def dialect_of(path: str) -> Dialect:
    """Whose error shape a path answers with."""
    path = split_key(path)[1]
    path = meant_path(path) or path
    return DIALECTS.get(path, MESSAGES if path.startswith("/v1/messages/") else CHAT)


def meant_path(path: str) -> str:
    """The model call that a path with one ``/v1`` too many or too few means; "" for any other path."""
    candidates = (path.removeprefix("/v1"), "/v1" + path)
    known = (c for c in candidates if c != path and (c in DIALECTS or c == MODELS or c.startswith(MODELS + "/")))
    return next(known, "")


def base_url_hint(path: str) -> str:
    """What is wrong with the base URL of a client that asked for a path which does not exist, or ""."""
    path = split_key(path)[1]
    meant = meant_path(path)
    if not meant:
        return ""
    if len(meant) > len(path):
        return f"; the base URL lacks its /v1: use `episode.base_url`, so that the path is {meant}"
    return (
        f"; the base URL has one /v1 too many, the path is {meant}: SDKs that append /v1 themselves, such as"
        " anthropic's, take `episode.anthropic_base_url`, the URL without /v1"
    )


def without_key(path: str) -> str:
    """A path as messages and logs may show it."""
    key, rest = split_key(path)
    return f"{KEY_PREFIX}...{rest}" if key else path


class ModelCalls:
    """Serves the model calls itself and hands everything else on."""

    def __init__(self, control: Control, rest: ASGIApp) -> None:
        self._control = control
        self._rest = rest
        self._max_bytes = control.config.server.max_body_bytes
        self._collected = CollectedCalls(
            control.collecting,
            control.gateway,
            begin=self._begun,
            check=control.limits.calls.check,
            on_replay=control.metrics.replays.inc,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        control = self._control
        key, path = split_key(scope["path"])
        dialect = DIALECTS.get(path)
        is_models = path == MODELS or path.startswith(MODELS + "/")
        if dialect is None and not is_models:
            await self._rest(scope, receive, send)
            return
        try:
            headers: dict[bytes, bytes] = dict(scope["headers"])
            check_method(scope, "GET" if dialect is None else "POST")
            wanted = key_headers(headers)
            caller = control.collecting.caller(wanted, path_key=key)
            if caller is None:
                episode = control.registry.by_key(wanted, path_key=key)
            else:
                episode = control.collecting.store.visitor(caller)
            hold = BodyHold(control.limits, episode.client)
            own = hold.admit(headers, receive)
            if dialect is None:
                hold.release()
                await self._models(episode, path.removeprefix(MODELS).removeprefix("/"), send)
                return
            try:
                body = await self._body(episode, headers, own)
                if path == COUNT:
                    await self._count(episode, body, send)
                    return
                fingerprint = Fingerprint.of(path, body, headers)
                if caller is None:
                    run = await self._run(dialect, episode, body, fingerprint)
                else:
                    run = await self._collected.run(CollectedCall(dialect, caller, headers, body, fingerprint))
            finally:
                hold.release()
            try:
                await self._answer(run, receive, send)
            finally:
                episode.last_seen = control.clock()
        except WingbeatError as error:
            await self._refuse(error, dialect or CHAT, scope, send)

    async def _refuse(self, error: WingbeatError, dialect: Dialect, scope: Scope, send: Send) -> None:
        """Whoever asks too fast is answered later, and so is who guesses keys."""
        if isinstance(error, AuthenticationError):
            try:
                self._control.limits.rate.spend(nobody(scope))
            except TooFast as refusal:
                error = refusal
        if isinstance(error, TooFast):
            await asyncio.sleep(error.pause_s)
        await answer_error(dialect, error, send)

    async def _body(self, episode: OpenEpisode, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise PayloadTooLarge(f"the body is larger than server.max_body_bytes = {self._max_bytes}")
        episode.require_open()
        episode.last_seen = self._control.clock()
        body = await read_body(receive, max_bytes=self._max_bytes)
        episode.require_open()
        return body

    async def _count(self, episode: OpenEpisode, body: bytes, send: Send) -> None:
        """How many tokens the prompt would have."""
        async with episode.graph_lock:
            prepared = await asyncio.to_thread(self._prepare, MESSAGES, MESSAGES.parse_count, episode, body)
        await answer(send, 200, MESSAGES.count(prepared), {})

    async def _run(self, dialect: Dialect, episode: OpenEpisode, body: bytes, fingerprint: Fingerprint) -> Run:
        """The run that answers this request: an earlier one for a retry, else a new one.

        Long requests take so long to tokenise that others would notice: they are prepared in a thread.
        """
        long = is_long(body)
        if not long and not episode.graph_lock.locked():
            return self._joined(episode, fingerprint) or self._begun(
                dialect, episode, episode.seen, fingerprint, self._prepare(dialect, dialect.parse, episode, body)
            )
        async with episode.graph_lock:
            run = self._joined(episode, fingerprint)
            if run is None:
                work = partial(self._prepare, dialect, dialect.parse, episode, body)
                prepared = await asyncio.to_thread(work) if long else work()
                episode.require_open()
                run = self._begun(dialect, episode, episode.seen, fingerprint, prepared)
            return run

    def _joined(self, episode: OpenEpisode, fingerprint: Fingerprint) -> Run | None:
        """The run that a retry belongs to."""
        run, replaced = self._control.registry.replays.find(episode.seen, fingerprint)
        episode.resampled.update(replaced)
        if run is not None:
            self._control.metrics.replays.inc()
        return run

    def _prepare(
        self, dialect: Dialect, parse: Callable[[Any], ModelCall], episode: OpenEpisode, body: bytes
    ) -> Prepared:
        self._control.limits.calls.check(episode.client)  # before all that work
        return self._control.gateway.prepare(episode, parse(decode_json(body)), turn_prefix=dialect.turn_prefix)

    def _begun(
        self, dialect: Dialect, episode: OpenEpisode, seen: SeenCalls, fingerprint: Fingerprint, prepared: Prepared
    ) -> Run:
        """Start the run of a prepared call; ``seen``: among which calls its retries are looked for."""
        config, calls = self._control.config, self._control.limits.calls
        client, num_calls = episode.client, prepared.call.n
        calls.take(client, num_calls)
        asked_again(episode, prepared.plan)
        run = Run(
            episode, prepared, dialect, grace_s=config.server.retry_grace_s, life_s=self._control.limits.config.call_s
        )
        seen.add(fingerprint, run)

        def ended(run: Run) -> None:
            calls.give(client, num_calls)
            self._control.registry.replays.keep(run)
            let_go_if_over(episode)

        run.start(self._control.gateway, prepared, ended)
        return run

    async def _answer(self, run: Run, receive: Receive, send: Send) -> None:
        """Send the run's frames as they come, until the end or until the caller hangs up."""
        reader = run.join()
        watching = asyncio.create_task(_watch(reader, receive), name="disconnect")
        try:
            while not (reader.gone or reader.finished):
                if reader.position < len(run.frames):
                    await _send_frames(run, reader, receive, send)
                elif run.error is not None:
                    raise run.error
                else:
                    await reader.wait()
        finally:
            run.leave(reader)
            watching.cancel()

    async def _models(self, episode: OpenEpisode, name: str, send: Send) -> None:
        """The policies of an episode, or the one called ``name``."""
        if not name:
            models = [_model(policy) for policy in episode.policies]
            await answer(send, 200, orjson.dumps({"object": "list", "data": models}), {})
            return
        if name.partition(":")[0] not in episode.policies:
            raise unknown_policy(name, episode.policies)
        await answer(send, 200, orjson.dumps(_model(name)), {})


async def _watch(reader: Reader, receive: Receive) -> None:
    await hang_up(receive)
    reader.hung_up()


async def _send_frames(run: Run, reader: Reader, receive: Receive, send: Send) -> None:
    """Send what the reader has not had yet, in one piece."""
    frames = run.frames[reader.position :]
    data = frames[0].data if len(frames) == 1 else b"".join(frame.data for frame in frames)
    if reader.position == 0:
        await send({"type": "http.response.start", "status": 200, "headers": _headers(run, len(data))})
    if has_hung_up(receive):
        reader.gone = True
        return
    reader.finished = frames[-1].last
    await send({"type": "http.response.body", "body": data, "more_body": not reader.finished})
    run.arrived([turn_id for frame in frames for turn_id in frame.completes])
    reader.position += len(frames)


def _headers(run: Run, length: int) -> list[tuple[bytes, bytes]]:
    own = [(name.encode(), value.encode()) for name, value in run.headers.items()]
    if run.stream:
        return [*EVENTS, *own]
    return [JSON, (b"content-length", str(length).encode()), *own]


def check_method(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise http_fault(405, f"{scope['method']} {without_key(scope['path'])}: use {method}")


async def answer_error(dialect: Dialect, error: WingbeatError, send: Send) -> None:
    await answer(send, error.status, dialect.error(error), error_headers(error))


async def answer(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    own = [(name.encode(), value.encode()) for name, value in headers.items()]
    fields = [JSON, (b"content-length", str(len(body)).encode()), *own]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "wingbeat"}
