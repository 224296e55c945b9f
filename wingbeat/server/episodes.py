"""Running episodes: their keys, token graphs and signs of life.

    OPEN ──finish──▶ CLOSING ──durable──▶ FINISHED
      │  ╲──abort──▶ ABORTED
      └──silence──▶ LOST ──finish──▶ CLOSING        (until a successor attempt begins: then SUPERSEDED)

A key is valid for one attempt.  What has ended is remembered for a while, so that a call after the
end gets a specific answer and a repeated finish gets the same one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wingbeat.core.errors import (
    AuthenticationError,
    EpisodeClosed,
    IdempotencyConflict,
    PermissionDenied,
    UnknownEpisode,
)
from wingbeat.core.protocol import BeginReply, FinishReply, TaskModel
from wingbeat.core.types import Outcome, Split
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.keys import EPISODE_PREFIX, RoleKeys, bearer, digest, keys_in
from wingbeat.server.replays import ReplayBook, SeenCalls
from wingbeat.tracking.graph import EpisodeGraph

REMEMBERED = 20_000
HEARTBEATS_UNTIL_LOST = 4
STRANGE_KEY = (
    "this API key belongs to no episode of this server; it has expired or is another server's."
    " Begin an episode and use its `api_key`"
)


class EpisodeState(StrEnum):
    """Where an attempt stands."""

    OPEN = "open"
    CLOSING = "closing"
    FINISHED = "finished"
    ABORTED = "aborted"
    LOST = "lost"
    SUPERSEDED = "superseded"


TRANSITIONS: Mapping[EpisodeState, frozenset[EpisodeState]] = {
    EpisodeState.OPEN: frozenset({EpisodeState.CLOSING, EpisodeState.ABORTED, EpisodeState.LOST}),
    EpisodeState.CLOSING: frozenset({EpisodeState.FINISHED}),
    EpisodeState.LOST: frozenset({EpisodeState.CLOSING, EpisodeState.SUPERSEDED, EpisodeState.ABORTED}),
    EpisodeState.FINISHED: frozenset(),
    EpisodeState.ABORTED: frozenset({EpisodeState.SUPERSEDED}),
    EpisodeState.SUPERSEDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """One attempt in memory."""

    episode_id: str
    attempt: int
    group: GroupSpec
    policies: dict[str, int | None]
    """Policy name to pinned version, or None for the live one."""
    label: str
    key_digest: str
    idle_timeout_s: float
    began_s: float
    """Wall clock."""
    last_seen: float
    """Monotonic."""
    graph: EpisodeGraph
    client: str = ""
    """Whose quota it counts against: the id of the caller's key, else what the client calls itself."""
    code: str = ""
    """Digest of the agent's code, where its client says."""
    state: EpisodeState = EpisodeState.OPEN
    has_heartbeat: bool = False
    calls: set[asyncio.Task[object]] = field(default_factory=set)
    highest_versions: dict[str, int] = field(default_factory=dict)
    """Per policy that was rolled back while it ran: versions above this one count as it."""
    truncated: set[tuple[str, str]] = field(default_factory=set)
    """(policy, agent) pairs of which a turn ended for length."""
    outcome: Outcome | None = None
    finish_digest: str = ""
    finishing: asyncio.Task[FinishReply] | None = None
    """The write that makes the finish durable; repeats wait for it, too."""
    finish_reply: FinishReply | None = None
    turn_numbers: itertools.count[int] = field(default_factory=itertools.count)
    undelivered: set[str] = field(default_factory=set)
    """Turns (begun ones, too) whose reply no caller has received."""
    resampled: set[str] = field(default_factory=set)
    """Turns whose retry had to be sampled anew."""
    graph_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while another thread reads the graph, and to append to it."""
    seen: SeenCalls = field(default_factory=SeenCalls)
    """Its model calls, for their retries."""
    instructed: set[str] = field(default_factory=set)
    """Turns whose system message was sent beside the conversation, for that request alone."""
    tools_by_digest: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The distinct tool lists of committed turns: a call may refer to them by an earlier turn."""

    @property
    def split(self) -> Split:
        return self.group.split

    @property
    def num_sampled(self) -> int:
        return self.graph.num_sampled_tokens

    def new_turn_id(self, prefix: str = "chatcmpl-") -> str:
        """Response ids are unique over the server: clients key on them."""
        return f"{prefix}{self.episode_id}-{self.attempt}-{next(self.turn_numbers)}"

    def become(self, state: EpisodeState) -> None:
        """Change state.  Raises EpisodeClosed where the table forbids it."""
        if state not in TRANSITIONS[self.state]:
            raise EpisodeClosed(f"episode {self.episode_id} attempt {self.attempt} is {self.state}")
        self.state = state

    def require_open(self) -> None:
        """Raises EpisodeClosed unless model calls are still welcome."""
        if self.state is not EpisodeState.OPEN:
            raise EpisodeClosed(
                f"episode {self.episode_id} attempt {self.attempt} is {self.state}: it takes no more model calls;"
                " begin a new episode"
            )


class EpisodeRegistry:
    """Finds attempts by id and by key."""

    def __init__(self, keys: RoleKeys, *, clock: Callable[[], float]) -> None:
        self.replays = ReplayBook()
        self._keys = keys
        self._clock = clock
        self._by_id: dict[str, OpenEpisode] = {}
        self._by_key: dict[str, OpenEpisode] = {}
        self._ended: OrderedDict[str, OpenEpisode] = OrderedDict()
        """By key digest, oldest first."""
        self._begun: OrderedDict[str, tuple[str, BeginReply]] = OrderedDict()
        """Idempotency key to (digest of the body, reply)."""

    def add(self, episode: OpenEpisode) -> None:
        """Register a new attempt; its predecessor, if any, can no longer count."""
        previous = self._by_id.get(episode.episode_id)
        if previous is not None and EpisodeState.SUPERSEDED in TRANSITIONS[previous.state]:
            self.end(previous, EpisodeState.SUPERSEDED)
        self._by_id[episode.episode_id] = episode
        self._by_key[episode.key_digest] = episode

    def lose(self, episode: OpenEpisode) -> None:
        """No sign of life: the graph stays, since a late finish may still count."""
        episode.become(EpisodeState.LOST)

    def end(self, episode: OpenEpisode, state: EpisodeState) -> None:
        """The attempt is over: its graph is let go, its end is remembered."""
        episode.become(state)
        self.remember(episode)

    def current(self, episode_id: str) -> OpenEpisode | None:
        """The newest attempt of an episode."""
        return self._by_id.get(episode_id)

    def remember(self, episode: OpenEpisode) -> None:
        """Let go of an ended attempt's tokens and answers; keep its end for later calls."""
        episode.graph = EpisodeGraph(episode.episode_id)
        self.replays.forget(episode.seen)
        for marks in (episode.undelivered, episode.resampled, episode.instructed, episode.tools_by_digest):
            marks.clear()
        self._ended[episode.key_digest] = episode
        while len(self._ended) > REMEMBERED:
            key, old = self._ended.popitem(last=False)
            self._by_key.pop(key, None)
            if self._by_id.get(old.episode_id) is old:
                del self._by_id[old.episode_id]

    def by_key(self, headers: Mapping[str, str], path_key: str = "") -> OpenEpisode:
        """The attempt whose key a model call carries.  Raises AuthenticationError."""
        keys = (path_key,) if path_key else keys_in(headers)
        if not keys:
            raise AuthenticationError("no API key: use the `api_key` that beginning the episode returned")
        for key in keys:
            episode = self._by_key.get(digest(key))
            if episode is not None:
                return episode
        raise AuthenticationError(STRANGE_KEY)

    def by_id(self, episode_id: str, headers: Mapping[str, str]) -> OpenEpisode:
        """The attempt that an episode call means: the key's own, or the current one for an admin.

        Raises UnknownEpisode, AuthenticationError, PermissionDenied.
        """
        key = bearer(headers)
        own = self._by_key.get(digest(key)) if key else None
        if own is not None:
            if own.episode_id != episode_id:
                raise PermissionDenied(f"this key belongs to another episode than {episode_id!r}")
            return own
        if key.startswith(EPISODE_PREFIX) and not self._keys.is_admin(headers):
            raise AuthenticationError(STRANGE_KEY)
        self._keys.require_admin(headers)
        episode = self._by_id.get(episode_id)
        if episode is None:
            raise UnknownEpisode(f"no episode {episode_id!r} is running or recently ended here")
        return episode

    def replay_begin(self, idempotency_key: str, body_digest: str) -> BeginReply | None:
        """The earlier answer to the same begin; None for a new one.  Raises IdempotencyConflict."""
        known = self._begun.get(idempotency_key)
        if known is None:
            return None
        if known[0] != body_digest:
            raise IdempotencyConflict(
                f"idempotency key {idempotency_key!r} was used with another body; use a new key per episode"
            )
        return known[1]

    def remember_begin(self, idempotency_key: str, body_digest: str, reply: BeginReply) -> None:
        self._begun[idempotency_key] = (body_digest, reply)
        while len(self._begun) > REMEMBERED:
            self._begun.popitem(last=False)

    def open_episodes(self) -> list[OpenEpisode]:
        return [e for e in self._by_id.values() if e.state in (EpisodeState.OPEN, EpisodeState.CLOSING)]

    def rebase(self, policy: str, *, highest: int) -> None:
        """A policy was rolled back: what attempts that may still count hold is not newer than ``highest``.

        That includes what they will sample in the new lineage: a token that seems older than it is, in an episode
        that ran through a rollback, is safer than telling the two apart.
        """
        for episode in self._by_id.values():
            if episode.state in (EpisodeState.OPEN, EpisodeState.LOST):
                episode.highest_versions[policy] = min(highest, episode.highest_versions.get(policy, highest))

    def silent(self, heartbeat_s: float) -> list[OpenEpisode]:
        """Open attempts that gave no sign of life for too long."""
        now = self._clock()
        lost: list[OpenEpisode] = []
        for episode in self._by_id.values():
            limit = episode.idle_timeout_s
            if episode.has_heartbeat:
                limit = min(limit, heartbeat_s * HEARTBEATS_UNTIL_LOST)
            if episode.state is EpisodeState.OPEN and not episode.calls and now - episode.last_seen > limit:
                lost.append(episode)
        return lost


def new_episode_prefix() -> str:
    """Random, so that ids of two runs never meet."""
    return f"ep-{secrets.token_hex(6)}"


def task_model(group: GroupSpec) -> TaskModel:
    return TaskModel(source=group.task.source, id=group.task.id, payload=group.task.payload)
