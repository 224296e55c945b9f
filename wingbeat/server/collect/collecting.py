"""Passive collection: conversations of applications become episodes, and feedback makes them train.

::

    calls ──▶ open, in memory ◀──▶ open, on disk ──feedback──▶ ledger ──▶ buffers (where key and policy allow it)
                                        ├──no feedback──▶ ledger, unscored
                                        └──delete──▶ gone

An open conversation is in no group and no lease: however long it waits, training does not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from wingbeat.core.errors import AuthenticationError, NotFoundError, PermissionDenied, UnknownEpisode
from wingbeat.core.protocol import DeletedReply
from wingbeat.core.types import Cause
from wingbeat.server.calls.replays import SeenCalls
from wingbeat.server.collect.conversation_files import ATTEMPT
from wingbeat.server.collect.conversations import CollectedEpisode, Conversation, episode_id_in
from wingbeat.server.collect.ends import CollectParts, ConversationEnds, Target, check_owner
from wingbeat.server.keys.principals import MAY_HOLD_EPISODES, Principal, Role
from wingbeat.server.keys.ring import keys_in
from wingbeat.tracking.messages import Message
from wingbeat.tracking.serialize import load_graph

KEY_PREFIX = "wb-collect-"
SWEEP_EVERY_S = 1.0
CLOSED_PER_SWEEP = 100
RUNS_OF_KEY = 8192
"""Calls of one key among which a retry is looked for."""


class Collecting:
    """Runs on control's event loop."""

    def __init__(self, parts: CollectParts) -> None:
        self._parts = parts
        self.store = parts.store
        self.clock = parts.clock
        self.ends = ConversationEnds(parts)
        self._seen: dict[str, SeenCalls] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}

    # --- who calls ------------------------------------------------------------------------------

    def caller(self, headers: Mapping[str, str], *, path_key: str = "") -> Principal | None:
        """Whose model call this is; None where no key of it collects.

        Raises AuthenticationError for a key that is unknown, expired or revoked.
        """
        given = (path_key,) if path_key else keys_in(headers)
        if not any(key.startswith(KEY_PREFIX) for key in given):
            return None
        found = self._parts.keys.principal(headers, path_key=path_key)
        if found.role is not Role.COLLECT:
            raise AuthenticationError("this server does not know this collect key: `wingbeat keys create` makes one")
        return found

    def claim(self, name: str, headers: Mapping[str, str]) -> Target | None:
        """The collected conversation that ``name`` (its id, or that of one of its responses) means; else None.

        Raises AuthenticationError, PermissionDenied, and UnknownEpisode for one of another key.
        """
        episode_id = episode_id_in(name)
        if not episode_id:
            return None
        caller = self._parts.keys.require(headers, MAY_HOLD_EPISODES)
        if caller.role is Role.CLIENT:
            raise PermissionDenied(
                f"episode {episode_id!r} was collected: use the collect key that it came with, or an admin key"
            )
        conversation = self.store.book.get(episode_id) or self.ends.pending.get(episode_id)
        if conversation is not None:
            check_owner(caller, conversation.key_id, episode_id)
        return Target(episode_id, caller, conversation)

    def seen_by(self, caller: Principal) -> SeenCalls:
        """The newest calls of a key."""
        found = self._seen.get(caller.key_id)
        if found is None:
            found = self._seen[caller.key_id] = SeenCalls(max_runs=RUNS_OF_KEY)
        return found

    def count_ambiguous(self, caller: Principal) -> None:
        self._parts.collect_metrics.ambiguous.labels(caller.name or caller.key_id).inc()

    def measure(self) -> None:
        """Tell the metrics what is open now."""
        self._parts.collect_metrics.now(self.store.book.counts(), self.store.book.num_bytes)

    async def delete(self, target: Target) -> DeletedReply:
        """Its text goes, from memory, disk and ledger; see :meth:`ConversationEnds.delete`.  Raises UnknownEpisode."""
        reply = await self.ends.delete(target)
        for seen in self._seen.values():
            for run in seen.order:
                if run.episode.episode_id == target.episode_id:
                    self._parts.replays.drop(run)
        return reply

    # --- life -----------------------------------------------------------------------------------

    def open(self, caller: Principal, *, name: str) -> CollectedEpisode:
        """A new conversation; one that waits too long for feedback may have to make room."""
        episode = self.store.open(caller, name=name)
        for conversation, why in tuple(self.store.crowded_out(caller.key_id)):
            self._close_later(conversation, why)
        return episode

    async def restore(self) -> None:
        """Take up the conversations that waited when the last process ended."""
        ledger = self._parts.ledger
        await asyncio.to_thread(
            self.store.restore, lambda episode_id: ledger.finish_of(episode_id, ATTEMPT) is not None
        )

    async def run(self) -> None:
        """Let idle conversations go from memory, and close those without feedback, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self.sweep()
            await self.ends.empty_log()

    def sweep(self) -> None:
        """What is due now."""
        self.store.unload_idle()
        for number, (conversation, why) in enumerate(tuple(self.store.overdue())):
            if number == CLOSED_PER_SWEEP:
                break
            self._close_later(conversation, why)

    async def close(self) -> None:
        """Before the ledger closes: end what runs, and leave everything on disk."""
        calls = [call for one in self.store.loaded if one.episode is not None for call in one.episode.calls]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, *self._closing.values(), return_exceptions=True)
        for conversation in self.store.loaded:
            self.store.unload(conversation)

    def _close_later(self, conversation: Conversation, why: str) -> None:
        """Unless it is being closed, or is called while its turns are read."""
        if conversation.episode_id in self._closing:
            return
        work = self.ends.close_unscored(conversation, Cause.FEEDBACK_MISSING, why, unless_used=True)
        task = self._closing[conversation.episode_id] = asyncio.create_task(work, name="close-conversation")
        task.add_done_callback(lambda _: self._closing.pop(conversation.episode_id, None))

    async def messages_of(self, caller: Principal, turn_id: str) -> tuple[Message, ...]:
        """The conversation up to a response of one that has ended.  Raises NotFoundError where it is not this key's."""
        unknown = NotFoundError(
            f"no response {turn_id!r} of this key is known; send the whole conversation", param="previous_turn_id"
        )
        episode_id = episode_id_in(turn_id)
        try:
            view = await self.ends.ended(Target(episode_id, caller, None))
        except UnknownEpisode:
            raise unknown from None
        if view.record is None or not view.record.graph:
            raise unknown
        graph = load_graph(view.record.graph)
        found = next((turn.messages for turn in graph.turns if turn.turn_id == turn_id), ())
        if not found:
            raise unknown
        return found
