"""Open conversations in memory and on disk: the newest in memory, all of them on disk, none of them too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from wingbeat.core.config.collect import CollectConfig
from wingbeat.core.errors import UnavailableError
from wingbeat.core.events import EventLog
from wingbeat.server.collect.conversation_files import ConversationFiles, Marks, Opened, StoredConversation, Taken
from wingbeat.server.collect.conversations import (
    CollectedEpisode,
    Conversation,
    ConversationBook,
    new_episode_id,
    open_episode,
    restore_turns,
)
from wingbeat.server.collect.metrics import CollectMetrics
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.server.keys.principals import Principal
from wingbeat.server.policies.host import PolicyHost
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.prefix_digests import PrefixKey, PrefixWalk
from wingbeat.tracking.serialize import dump_turn
from wingbeat.tracking.turns import Turn, TurnKind

logger = logging.getLogger(__name__)

UNRECORDED = "unrecorded"


class ConversationStore:
    """Runs on control's event loop; reads files in threads."""

    def __init__(
        self,
        files: ConversationFiles,
        policies: Mapping[str, PolicyHost],
        config: CollectConfig,
        *,
        metrics: CollectMetrics,
        events: EventLog,
        on_idle: Callable[[str], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """``on_idle`` is told the id of a conversation that left the memory."""
        self.book = ConversationBook()
        self.files = files
        self._policies = policies
        self._config = config
        self._metrics = metrics
        self._events = events
        self._on_idle = on_idle
        self._clock = clock
        self._wall = wall
        self._loaded: dict[str, Conversation] = {}
        self._told_of_the_disk = False

    # --- from the disk and back -----------------------------------------------------------------

    def restore(self, has_ended: Callable[[str], bool]) -> None:
        """Take up what waited for feedback when the last process ended.

        ``has_ended`` tells whether the ledger has an episode already: its file was about to be removed.
        """
        for path in self.files.unreadable():
            self._tell_of_damage("", f"{path.name} is damaged from its beginning: nobody knows whose it is")
        for episode_id in self.files.names():
            if has_ended(episode_id):
                self.files.remove(episode_id)
                continue
            stored, is_damaged = self.files.take_up(episode_id)
            if is_damaged:
                self._tell_of_damage(episode_id, "turns of it are damaged on disk: what is before them stands")
            if stored is None or not stored.turns:
                self.files.remove(episode_id)
                continue
            self.book.add(self._conversation_of(episode_id, stored))

    def _conversation_of(self, episode_id: str, stored: StoredConversation) -> Conversation:
        opened, last_s = stored.opened, stored.turns[-1].at_s
        return Conversation(
            episode_id=episode_id,
            key_id=opened.key_id,
            key_name=opened.key_name,
            name=opened.conversation_id,
            train=opened.train,
            policies=opened.policies,
            opened_s=opened.opened_s,
            last_s=last_s,
            last_used=self._clock() - max(0.0, self._wall() - last_s),
            num_turns=len(stored.turns),
            num_bytes=stored.num_bytes,
            prefixes=[PrefixKey(taken.meaning, taken.call_ids) for taken in stored.turns if taken.meaning],
        )

    async def load(self, conversation: Conversation, *, caller: Principal | None = None) -> CollectedEpisode | None:
        """Its turns in memory; None where it has ended meanwhile, or the disk has lost them."""
        async with conversation.loading:
            if conversation.episode is None and not conversation.ended:
                stored, is_damaged = await asyncio.to_thread(self.files.take_up, conversation.episode_id)
                if conversation.ended:
                    return None
                if is_damaged:
                    self._tell_of_damage(conversation.episode_id, "turns of it are damaged on disk")
                episode = self._empty(conversation, caller=caller)
                try:
                    if stored is None:
                        raise ValueError("its file is gone")
                    restore_turns(episode, stored)
                except ValueError as error:
                    self._lost(conversation, str(error))
                    return None
                conversation.episode = episode
                self._loaded[conversation.episode_id] = conversation
            return None if conversation.ended else conversation.episode

    def _lost(self, conversation: Conversation, error: str) -> None:
        """What is on disk cannot be read."""
        self._tell_of_damage(conversation.episode_id, f"it cannot be read: {error}")
        self.end(conversation)
        self._metrics.ended.labels(conversation.key_name, "lost").inc()

    def _tell_of_damage(self, episode_id: str, error: str) -> None:
        logger.error("collected conversation %s: %s", episode_id, error)
        self._events.emit("collected_lost", episode_id=episode_id, error=error)

    def unload_idle(self) -> None:
        """Those without a call for a while go on waiting on the disk only."""
        horizon = self._clock() - self._config.idle_s
        for conversation in tuple(self._loaded.values()):
            if conversation.last_used <= horizon and not conversation.is_busy:
                self.unload(conversation)

    def unload(self, conversation: Conversation) -> None:
        """Let go of its turns; one that never had any ends."""
        episode, conversation.episode = conversation.episode, None
        self._loaded.pop(conversation.episode_id, None)
        self._on_idle(conversation.episode_id)
        if not conversation.num_turns:
            self.end(conversation)
        elif episode is not None:
            known = {turn.turn_id for turn in episode.graph.turns}
            kinds = (episode.undelivered, episode.resampled, episode.in_doubt)
            marks = Marks(*(tuple(sorted(kind & known)) for kind in kinds))
            if marks != episode.stored_marks:  # (whoever only looks at it leaves it as it was)
                self._append(conversation, marks)
        _release(episode)

    @property
    def loaded(self) -> tuple[Conversation, ...]:
        """Those in memory."""
        return tuple(self._loaded.values())

    # --- life -------------------------------------------------------------------------------------

    def open(self, caller: Principal, *, name: str) -> CollectedEpisode:
        """A new conversation of a key."""
        now, clock = self._wall(), self._clock()
        conversation = Conversation(
            episode_id=new_episode_id(),
            key_id=caller.key_id,
            key_name=caller.name or caller.key_id,
            name=name,
            train=caller.train,
            policies=self.allowed(caller),
            opened_s=now,
            last_s=now,
            last_used=clock,
        )
        conversation.episode = self._empty(conversation, caller=caller)
        self.book.add(conversation)
        self._loaded[conversation.episode_id] = conversation
        return conversation.episode

    def _empty(self, conversation: Conversation, *, caller: Principal | None) -> CollectedEpisode:
        policies = conversation.policies if caller is None else self.allowed(caller)
        episode = self._episode(conversation, conversation.key_id, policies)
        episode.at_policy_temperature = conversation.train and self._config.temperature == "policy"
        return episode

    def visitor(self, caller: Principal) -> CollectedEpisode:
        """An episode of which nothing is kept: for calls that sample nothing, and keys that record nothing."""
        return self._episode(None, caller.key_id, self.allowed(caller))

    def _episode(self, conversation: Conversation | None, key_id: str, policies: Sequence[str]) -> CollectedEpisode:
        return open_episode(conversation, key_id=key_id, policies=policies, wall=self._wall(), clock=self._clock())

    def allowed(self, caller: Principal) -> tuple[str, ...]:
        """The policies that a key may call, those that train first."""
        names = [name for name in self._policies if not caller.policies or name in caller.policies]
        return tuple(sorted(names, key=lambda name: not self._policies[name].config.trainable))

    def capture(self, episode: CollectedEpisode, turn: Turn) -> None:
        """A turn that its caller may have seen must outlive this process.

        Where the disk takes it not, the application still gets its answer; the conversation is no longer kept.
        """
        walk, conversation = episode.walks.pop(turn.turn_id, None), episode.conversation
        if conversation is None or conversation.ended:
            return
        lineage = self._policies[turn.policy].ancestry.current
        episode.lineages[turn.turn_id] = lineage
        prefix = self._prefix(conversation, turn, walk)
        tools = b""
        if turn.tools_digest and turn.tools_digest not in episode.known_tools:
            tools = msgspec.json.encode(episode.tools_by_digest.get(turn.tools_digest))
        conversation.last_s = self._wall()
        taken = Taken(
            turn=dump_turn(episode.graph, turn),
            at_s=conversation.last_s,
            lineage=lineage,
            meaning=b"" if prefix is None else prefix.meaning,
            call_ids=b"" if prefix is None else prefix.call_ids,
            tools=tools,
            instructed=turn.turn_id in episode.instructed,
            undelivered=tuple(sorted(episode.undelivered - {turn.turn_id})),
            resampled=tuple(sorted(episode.resampled)),
            in_doubt=tuple(sorted(episode.in_doubt)),
        )
        episode.stored_marks = None
        first = conversation.num_turns == 0
        if (first and not self._append(conversation, _opened(conversation))) or not self._append(conversation, taken):
            return
        if tools:
            episode.known_tools.add(turn.tools_digest)
        conversation.num_turns += 1
        self.book.grow(conversation, num_bytes=0, prefix=prefix)

    def _prefix(self, conversation: Conversation, turn: Turn, walk: PrefixWalk | None) -> PrefixKey | None:
        """What a call that goes on with this turn begins with."""
        if turn.kind is not TurnKind.CHAT:
            return None
        if walk is None:
            return PrefixWalk(*walk_owner(conversation.key_id, turn.policy, turn.agent)).after(turn.messages).key
        return walk.after([turn.reply]).key

    def _append(self, conversation: Conversation, piece: Opened | Taken | Marks) -> bool:
        """Whether the disk took it; else the conversation is no longer kept."""
        try:
            size = self.files.append(conversation.episode_id, piece)
        except UnavailableError as error:
            if not self._told_of_the_disk:
                self._told_of_the_disk = True
                logger.warning("conversations are answered and not recorded: %s", error)
            self._events.emit("collected_unrecorded", episode_id=conversation.episode_id, error=error.message)
            self.end(conversation)
            self.files.remove(conversation.episode_id)
            self._metrics.ended.labels(conversation.key_name, UNRECORDED).inc()
            return False
        self._told_of_the_disk = False
        self.book.grow(conversation, num_bytes=size)
        return True

    def end(self, conversation: Conversation) -> None:
        """It takes no more calls; those that run get their answers.  Its file stays until :meth:`forget`."""
        conversation.ended = True
        episode, conversation.episode = conversation.episode, None
        _release(episode)
        self.book.remove(conversation)
        self._loaded.pop(conversation.episode_id, None)
        self._on_idle(conversation.episode_id)

    def forget(self, conversation: Conversation) -> None:
        """The ledger has it, or nobody wants it: its file goes."""
        self.files.remove(conversation.episode_id)

    def overdue(self) -> Iterator[tuple[Conversation, str]]:
        """Those that wait no longer for feedback, with the reason in words."""
        horizon = self._clock() - self._config.feedback_s
        surplus = self.book.num_bytes - self._config.max_disk_mb * 2**20
        for conversation in self.book:
            if conversation.is_busy:
                continue
            if conversation.last_used <= horizon:
                yield conversation, f"no feedback within collect.feedback_s = {self._config.feedback_s:g}"
            elif surplus > 0:
                yield conversation, f"collect.max_disk_mb = {self._config.max_disk_mb} is reached"
            else:
                return
            surplus -= conversation.num_bytes

    def crowded_out(self, key_id: str) -> Iterator[tuple[Conversation, str]]:
        """Those of one key that are too many."""
        excess = self.book.num_of(key_id) - self._config.max_open
        for conversation in self.book.of_key(key_id) if excess > 0 else ():
            if excess <= 0:
                return
            if not conversation.is_busy and conversation.num_turns:
                excess -= 1
                yield conversation, f"collect.max_open = {self._config.max_open} is reached"


def let_go_if_over(episode: OpenEpisode) -> None:
    """After a call: of a conversation that nobody goes on with no text stays in memory, answers for retries aside."""
    if isinstance(episode, CollectedEpisode) and (episode.conversation is None or episode.conversation.ended):
        _release(episode)


def _release(episode: CollectedEpisode | None) -> None:
    """Let go of its tokens, whoever still knows of it (answers that are kept for retries do), unless a call runs."""
    if episode is not None and not episode.calls:
        episode.graph = EpisodeGraph(episode.episode_id)
        episode.tools_by_digest.clear()


def _opened(conversation: Conversation) -> Opened:
    return Opened(
        key_id=conversation.key_id,
        key_name=conversation.key_name,
        conversation_id=conversation.name,
        train=conversation.train,
        policies=conversation.policies,
        opened_s=conversation.opened_s,
    )


def walk_owner(key_id: str, policy: str, agent: str) -> tuple[str, str, str]:
    """Whose turns may be continued by a call: those of the same key, policy and agent."""
    return key_id, policy, agent
