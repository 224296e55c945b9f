"""Open conversations of applications: whose they are, and which one a call goes on with.

A conversation is an episode that nobody began and that waits for feedback.  While it is idle only this book knows of
it, in a few hundred bytes; its turns are on disk (:mod:`wingbeat.server.collect.conversation_files`).
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from wingbeat.core.protocol import FinishReply
from wingbeat.core.types import FinishReason, Split, Task
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.collect.conversation_files import ATTEMPT, Marks, StoredConversation
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.prefix_digests import PrefixKey, PrefixWalk
from wingbeat.tracking.serialize import load_turns

ID_PREFIX = "ep-c-"
"""No other episode's id begins so."""
SOURCE_PREFIX = "collect:"
"""Before a key's name: the task source of its conversations."""
NAMED = re.compile(rf"(?:chatcmpl-|cmpl-|resp_|msg_)?({ID_PREFIX}[0-9a-f]{{24}})(?:-{ATTEMPT}-\d+)?")
TURN_NUMBERS = 1000
"""A conversation that comes back numbers its turns from the next multiple, so that no id is given twice."""


def episode_id_in(name: str) -> str:
    """The id of a collected episode that ``name`` is, or that the response id ``name`` holds; "" for anything else."""
    found = NAMED.fullmatch(name)
    return found.group(1) if found is not None else ""


def new_episode_id() -> str:
    """Random; who knows it still needs the key."""
    return ID_PREFIX + secrets.token_hex(12)


def group_id_of(episode_id: str) -> str:
    return f"collected:{episode_id}"


def group_of(episode_id: str, *, key_name: str, name: str, train: bool, policies: Sequence[str]) -> GroupSpec:
    """The group of a conversation, which is its only member."""
    return GroupSpec(
        id=group_id_of(episode_id),
        task=Task(SOURCE_PREFIX + key_name, name or episode_id),
        split=Split.TRAIN if train else Split.EVAL,
        size=1,
        policies=tuple(policies),
    )


def is_collected(group_id: str) -> bool:
    return group_id.startswith(f"collected:{ID_PREFIX}")


@dataclass(slots=True, eq=False)
class Conversation:
    """One that waits for feedback."""

    episode_id: str
    key_id: str
    key_name: str
    name: str
    """As the application calls it; "" where it does not say."""
    train: bool
    policies: tuple[str, ...]
    opened_s: float
    """Wall clock."""
    last_s: float
    """Wall clock, of its last turn."""
    last_used: float
    """Monotonic; of one that comes back after a restart, as long ago as its last turn."""
    num_turns: int = 0
    num_bytes: int = 0
    prefixes: list[PrefixKey] = field(default_factory=list[PrefixKey])
    episode: CollectedEpisode | None = None
    """None while it is on disk only."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False
    finish_digest: str = ""
    finishing: asyncio.Task[FinishReply] | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """The ledger has its end, or failed to take it."""

    @property
    def group(self) -> GroupSpec:
        """What it will be in the ledger; the versions are known at its end."""
        return group_of(
            self.episode_id, key_name=self.key_name, name=self.name, train=self.train, policies=self.policies
        )

    @property
    def is_busy(self) -> bool:
        return self.loading.locked() or (self.episode is not None and bool(self.episode.calls))


@dataclass(slots=True, eq=False)
class CollectedEpisode(OpenEpisode):
    """The turns of a conversation in memory, as the gateway takes episodes."""

    conversation: Conversation | None = None
    """None where its key records nothing."""
    lineages: dict[str, int] = field(default_factory=dict[str, int])
    """Per turn, that of its policy when it was sampled."""
    walks: dict[str, PrefixWalk] = field(default_factory=dict[str, PrefixWalk])
    """Per turn that is being sampled, the conversation that it answers."""
    known_tools: set[str] = field(default_factory=set[str])
    """Digests of the tools that are on disk."""
    stored_marks: Marks | None = None
    """What its file says at the end; None where that is a turn."""
    at_policy_temperature: bool = False

    @property
    def obeys_caller(self) -> bool:
        """An application in production gets what it asks for."""
        return not self.at_policy_temperature

    def require_open(self) -> None:
        """Feedback never breaks off an answer: what is sampled after it is no part of the episode."""


def open_episode(
    conversation: Conversation | None, *, key_id: str, policies: Sequence[str], wall: float, clock: float
) -> CollectedEpisode:
    """An episode without turns; without a conversation nothing of it is kept."""
    episode_id = new_episode_id() if conversation is None else conversation.episode_id
    unkept = GroupSpec(group_id_of(episode_id), Task(SOURCE_PREFIX, episode_id), Split.EVAL, 1, tuple(policies))
    return CollectedEpisode(
        episode_id=episode_id,
        attempt=ATTEMPT,
        group=unkept if conversation is None else conversation.group,
        policies=dict.fromkeys(policies),
        label="",
        key_digest="",
        idle_timeout_s=0.0,
        began_s=wall if conversation is None else conversation.opened_s,
        last_seen=clock,
        graph=EpisodeGraph(episode_id),
        client=key_id,
        conversation=conversation,
    )


def restore_turns(episode: CollectedEpisode, stored: StoredConversation) -> None:
    """The turns of a conversation that comes back from the disk.  Raises ValueError where they are damaged."""
    episode.graph = load_turns(episode.episode_id, (taken.turn for taken in stored.turns))
    numbers: list[int] = []
    for turn, taken in zip(episode.graph.turns, stored.turns, strict=True):
        numbers.append(int(turn.turn_id.rpartition("-")[2]))
        episode.lineages[turn.turn_id] = taken.lineage
        if taken.instructed:
            episode.instructed.add(turn.turn_id)
        if taken.tools:
            episode.tools_by_digest[turn.tools_digest] = msgspec.json.decode(taken.tools)
            episode.known_tools.add(turn.tools_digest)
        if turn.finish_reason is FinishReason.LENGTH:
            episode.truncated.add((turn.policy, turn.agent))
    episode.undelivered.update(stored.marks.undelivered)
    episode.resampled.update(stored.marks.resampled)
    episode.in_doubt.update(stored.marks.in_doubt)
    episode.stored_marks = None if stored.is_cut_off else stored.marks
    if stored.is_cut_off:
        _doubt_the_last(episode)
    episode.turn_numbers = itertools.count((max(numbers, default=-1) // TURN_NUMBERS + 1) * TURN_NUMBERS)


def _doubt_the_last(episode: CollectedEpisode) -> None:
    """Its caller, and those of the other choices of its call, may have got their replies; if the call comes again,
    they have not."""
    turns = episode.graph.turns
    last = turns[-1]
    episode.undelivered.update(turn.turn_id for turn in turns if turn.finish_reason is FinishReason.ABORT)
    siblings = {
        turn.turn_id
        for turn in turns
        if (turn.policy, turn.agent, turn.parent_id) == (last.policy, last.agent, last.parent_id)
        and turn.turn_id in episode.undelivered
        and turn.finish_reason is not FinishReason.ABORT
        and np.array_equal(turn.segment, last.segment)
    }
    episode.undelivered -= siblings
    episode.in_doubt |= siblings | ({last.turn_id} - episode.undelivered)


class ConversationBook:
    """Finds open conversations; those that were idle longest come first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()
        self._by_key: dict[str, OrderedDict[str, Conversation]] = {}
        self._by_name: dict[tuple[str, str], Conversation] = {}
        self._by_prefix: dict[bytes, list[tuple[bytes, Conversation]]] = {}
        """Meaning of a conversation with a reply, to (tool-call ids, whose it is)."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(tuple(self._by_id.values()))

    def get(self, episode_id: str) -> Conversation | None:
        return self._by_id.get(episode_id)

    def named(self, key_id: str, name: str) -> Conversation | None:
        """The open one that the application of this key calls ``name``."""
        return self._by_name.get((key_id, name))

    def of_key(self, key_id: str) -> tuple[Conversation, ...]:
        return tuple(self._by_key.get(key_id, {}).values())

    def num_of(self, key_id: str) -> int:
        return len(self._by_key.get(key_id, ()))

    def counts(self) -> dict[str, int]:
        """Open ones by name of the key."""
        found: Counter[str] = Counter()
        for conversations in self._by_key.values():
            one = next(iter(conversations.values()))
            found[one.key_name] += len(conversations)
        return dict(found)

    def add(self, conversation: Conversation) -> None:
        self._by_id[conversation.episode_id] = conversation
        self._by_key.setdefault(conversation.key_id, OrderedDict())[conversation.episode_id] = conversation
        if conversation.name:
            self._by_name[conversation.key_id, conversation.name] = conversation
        self.num_bytes += conversation.num_bytes
        for prefix in conversation.prefixes:
            self._by_prefix.setdefault(prefix.meaning, []).append((prefix.call_ids, conversation))

    def touch(self, conversation: Conversation, *, clock: float) -> None:
        """It was called just now."""
        conversation.last_used = clock
        if conversation.episode_id in self._by_id:
            self._by_id.move_to_end(conversation.episode_id)
            self._by_key[conversation.key_id].move_to_end(conversation.episode_id)

    def grow(self, conversation: Conversation, *, num_bytes: int, prefix: PrefixKey | None = None) -> None:
        """It has more on disk, and perhaps a reply that can be continued."""
        conversation.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if prefix is not None:
            conversation.prefixes.append(prefix)
            self._by_prefix.setdefault(prefix.meaning, []).append((prefix.call_ids, conversation))

    def remove(self, conversation: Conversation) -> None:
        """It takes no more calls."""
        if self._by_id.pop(conversation.episode_id, None) is None:
            return
        own = self._by_key[conversation.key_id]
        del own[conversation.episode_id]
        if not own:
            del self._by_key[conversation.key_id]
        if self._by_name.get((conversation.key_id, conversation.name)) is conversation:
            del self._by_name[conversation.key_id, conversation.name]
        self.num_bytes -= conversation.num_bytes
        for prefix in set(conversation.prefixes):
            left = [one for one in self._by_prefix.pop(prefix.meaning, ()) if one[1] is not conversation]
            if left:
                self._by_prefix[prefix.meaning] = left

    def continued(self, candidates: Sequence[PrefixKey]) -> tuple[Conversation | None, bool]:
        """The one whose messages and reply begin a call, of the deepest candidate that has one; whether it is unclear.

        Where several say the same, their tool-call ids decide.  Where those are the same, too, none is taken: what
        two users say must not end up in one episode.
        """
        for candidate in reversed(candidates):
            found = self._by_prefix.get(candidate.meaning)
            if not found:
                continue
            fitting = {one.episode_id: one for ids, one in found if ids == candidate.call_ids}
            fitting = fitting or {one.episode_id: one for _, one in found}
            return (next(iter(fitting.values())), False) if len(fitting) == 1 else (None, True)
        return None, False
