"""Model calls of applications: from a key and a body to the conversation that the call belongs to.

::

    a response id (previous_response_id, thread)     ──▶ the conversation that holds it
    x-wingbeat-conversation, metadata.conversation_id ──▶ the open one of that name, else a new one
    messages that begin with a known conversation      ──▶ that one
    anything else                                      ──▶ a new one
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from wingbeat.core.errors import NotFoundError, RequestError, WingbeatError
from wingbeat.server.calls.dialects.base import Dialect
from wingbeat.server.calls.gateway import Gateway
from wingbeat.server.calls.model_call import ChatPrompt, ModelCall, Prepared
from wingbeat.server.calls.replays import Fingerprint, SeenCalls
from wingbeat.server.calls.runs import Run
from wingbeat.server.collect.collecting import Collecting
from wingbeat.server.collect.conversation_store import let_go_if_over, walk_owner
from wingbeat.server.collect.conversations import CollectedEpisode, Conversation, episode_id_in
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.server.http.requests import decode_json, is_long
from wingbeat.server.keys.principals import Principal
from wingbeat.tracking.messages import Message
from wingbeat.tracking.prefix_digests import PrefixKey, PrefixWalk

CONVERSATION_HEADER = b"x-wingbeat-conversation"
EPISODE_HEADER = "x-wingbeat-episode"
METADATA_KEY = "conversation_id"
MAX_NAME = 200

Begin = Callable[[Dialect, OpenEpisode, SeenCalls, Fingerprint, Prepared], Run]


@dataclass(frozen=True, slots=True)
class CollectedCall:
    """One call as it came."""

    dialect: Dialect
    caller: Principal
    headers: Mapping[bytes, bytes]
    body: bytes
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A call, and by what its conversation may be found."""

    call: ModelCall
    name: str
    """As the application calls its conversation; "" where it does not say."""
    walk: PrefixWalk | None
    """Along its messages; None where they are not the whole conversation."""
    candidates: tuple[PrefixKey, ...]
    """What it is up to each reply in it, the deepest last."""


class CollectedCalls:
    """Runs on control's event loop."""

    def __init__(
        self,
        collecting: Collecting,
        gateway: Gateway,
        *,
        begin: Begin,
        check: Callable[[str], None],
        on_replay: Callable[[], None],
    ) -> None:
        """``begin`` starts the run of a prepared call, ``check`` refuses a client with too many calls."""
        self._collecting = collecting
        self._gateway = gateway
        self._begin = begin
        self._check = check
        self._on_replay = on_replay

    async def run(self, request: CollectedCall) -> Run:
        """The run that answers a call: an earlier one for a retry, else a new one.

        Raises whatever a model call may be refused with.
        """
        joined, replaced = self._retried(request)
        if joined is not None:
            return joined
        self._check(request.caller.key_id)  # before all that work
        parsed = await asyncio.to_thread(_parse, request) if is_long(request.body) else _parse(request)
        episode, parsed = await self._episode_of(request.caller, parsed, replaced)
        conversation = episode.conversation
        try:
            return await self._prepared(request, parsed, episode)
        except WingbeatError:
            if conversation is not None and not conversation.num_turns and not episode.calls:
                self._collecting.store.end(conversation)
            raise

    def _retried(self, request: CollectedCall) -> tuple[Run | None, Run | None]:
        """The run that a retry joins; or the one whose answer nobody got and that must be sampled anew.

        Calls of all users of an application come with one key, so an equal body alone says little: only what nobody
        received can be what a caller without a key for the request asks for again.
        """
        seen, fingerprint = self._collecting.seen_by(request.caller), request.fingerprint
        joined, replaced = seen.answering(fingerprint, only_orphans=not fingerprint.idempotency_key)
        if joined is not None:
            self._on_replay()
        return joined, replaced

    async def _episode_of(
        self, caller: Principal, parsed: _Parsed, replaced: Run | None
    ) -> tuple[CollectedEpisode, _Parsed]:
        """Where the call's turn goes; the call itself changes where it continues what has ended."""
        store = self._collecting.store
        if not caller.record:
            return store.visitor(caller), parsed
        conversation = self._found(caller, parsed, replaced)
        if conversation is not None:
            store.book.touch(conversation, clock=self._collecting.clock())
            episode = await store.load(conversation, caller=caller)
            if episode is not None:
                if replaced is not None and replaced.episode is episode:
                    episode.resampled.update(replaced.turn_ids)
                return episode, parsed
        if parsed.walk is None:
            parsed = replace(parsed, call=await self._whole(caller, parsed.call))
        return self._collecting.open(caller, name=parsed.name), parsed

    def _found(self, caller: Principal, parsed: _Parsed, replaced: Run | None) -> Conversation | None:
        """The open conversation that the call goes on with."""
        book, prompt = self._collecting.store.book, parsed.call.prompt
        if replaced is not None and isinstance(replaced.episode, CollectedEpisode):
            same = replaced.episode.conversation
            if same is not None and not same.ended:
                return same
        if isinstance(prompt, ChatPrompt) and prompt.previous_turn_id:
            found = book.get(episode_id_in(prompt.previous_turn_id))
            return found if found is not None and found.key_id == caller.key_id else None
        if parsed.name:
            return book.named(caller.key_id, parsed.name)
        found, is_unclear = book.continued(parsed.candidates)
        if is_unclear:
            self._collecting.count_ambiguous(caller)
        return found

    async def _whole(self, caller: Principal, call: ModelCall) -> ModelCall:
        """A call that goes on with a conversation that has ended, with all its messages in place of an id."""
        prompt = call.prompt
        assert isinstance(prompt, ChatPrompt)
        if prompt.keeps_tools:
            raise NotFoundError(
                f"the conversation of {prompt.previous_turn_id!r} has ended, and its tools with it: send the whole"
                " conversation",
                param="thread",
            )
        earlier = await self._collecting.messages_of(caller, prompt.previous_turn_id)
        if prompt.instructions and earlier[0].role == "system":
            earlier = earlier[1:]
        whole = ChatPrompt((*earlier, *prompt.messages), instructions=prompt.instructions)
        return replace(call, prompt=whole)

    async def _prepared(self, request: CollectedCall, parsed: _Parsed, episode: CollectedEpisode) -> Run:
        """Long prompts are tokenised in a thread; what ends the conversation meanwhile leaves the call its turns."""
        work = partial(self._gateway.prepare, episode, parsed.call, turn_prefix=request.dialect.turn_prefix)
        preparing = asyncio.current_task()
        assert preparing is not None
        episode.calls.add(preparing)
        try:
            if not is_long(request.body) and not episode.graph_lock.locked():
                prepared = work()
            else:
                async with episode.graph_lock:
                    prepared = await asyncio.to_thread(work)
            if episode.conversation is not None:
                prepared.enforced[EPISODE_HEADER] = episode.episode_id
            if parsed.walk is not None:
                episode.walks.update(dict.fromkeys(prepared.turn_ids, parsed.walk))
            seen = self._collecting.seen_by(request.caller)
            return self._begin(request.dialect, episode, seen, request.fingerprint, prepared)
        finally:
            episode.calls.discard(preparing)
            let_go_if_over(episode)


def _parse(request: CollectedCall) -> _Parsed:
    """Raises RequestError."""
    value = decode_json(request.body)
    call = request.dialect.parse(value)
    name = _name(request.headers, value)
    prompt = call.prompt
    walk = PrefixWalk(*walk_owner(request.caller.key_id, call.policy, call.agent))
    if not isinstance(prompt, ChatPrompt):
        return _Parsed(call, name, walk, ())
    if prompt.previous_turn_id:
        return _Parsed(call, name, None, ())
    candidates: list[PrefixKey] = []
    head = (Message("system", prompt.instructions),) if prompt.instructions else ()
    for message in (*head, *prompt.messages):
        walk.push(message)
        if message.role == "assistant":
            candidates.append(walk.key)
    return _Parsed(call, name, walk, tuple(candidates))


def _name(headers: Mapping[bytes, bytes], body: Any) -> str:
    """How the application calls the conversation: in a header, else in ``metadata``.  Raises RequestError."""
    given = headers.get(CONVERSATION_HEADER)
    where, name = CONVERSATION_HEADER.decode(), given.decode("latin-1") if given is not None else None
    if name is None:
        metadata = body.get("metadata")
        where, name = f"metadata.{METADATA_KEY}", metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if name is None:
        return ""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise RequestError(f"`{where}` must be 1 to {MAX_NAME} printable characters", param=where)
    return name
