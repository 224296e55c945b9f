"""Running episodes: their keys, token graphs and signs of life.

    OPEN ──finish──▶ CLOSING ──durable──▶ FINISHED
      │  ╲──abort──▶ ABORTED
      └──silence──▶ LOST ──finish──▶ CLOSING        (until a successor attempt begins: then SUPERSEDED)

    OPEN, LOST ──finish in a transaction──▶ PREPARED ──commit──▶ CLOSING, or ──abort──▶ ABORTED

Before OPEN an attempt may be TENTATIVE: begun on trial, until it is confirmed, or lapses into ABORTED.

A key is valid for one attempt; a begin that is repeated after a restart adds another.  What has ended is
remembered for a while, so that a call after the end gets a specific answer and a repeated finish the same one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wingbeat.core.errors import (
    AuthenticationError,
    EpisodeClosed,
    PermissionDenied,
    UnknownEpisode,
)
from wingbeat.core.protocol import FinishReply, TaskModel
from wingbeat.core.types import OUTCOME_OF, Cause, Outcome, Split
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.replays import ReplayBook, SeenCalls
from wingbeat.server.episodes.ended import Ended, EndedAttempts, let_go
from wingbeat.server.keys.principals import MAY_HOLD_EPISODES, Role
from wingbeat.server.keys.ring import EPISODE_PREFIX, KeyRing, bearer, digest, keys_in
from wingbeat.tracking.graph import EpisodeGraph

REMEMBERED = 20_000
HEARTBEATS_UNTIL_LOST = 4
HEARTBEATS_AFTER_RESTART = 2
"""Clients beat more often than once in a period; those that live are back by then."""
STRANGE_KEY = (
    "this API key belongs to no episode of this server; it has expired or is another server's."
    " Begin an episode and use its `api_key`; an application without episodes has a collect key"
)


class EpisodeState(StrEnum):
    """Where an attempt stands."""

    TENTATIVE = "tentative"
    """Begun on trial, and not confirmed yet."""
    OPEN = "open"
    PREPARED = "prepared"
    """Its finish is durable and waits for its transaction (server/teams/transactions.py)."""
    CLOSING = "closing"
    FINISHED = "finished"
    ABORTED = "aborted"
    LOST = "lost"
    SUPERSEDED = "superseded"


TRANSITIONS: Mapping[EpisodeState, frozenset[EpisodeState]] = {
    EpisodeState.TENTATIVE: frozenset({EpisodeState.OPEN, EpisodeState.ABORTED}),
    EpisodeState.OPEN: frozenset(
        {EpisodeState.CLOSING, EpisodeState.ABORTED, EpisodeState.LOST, EpisodeState.PREPARED}
    ),
    EpisodeState.PREPARED: frozenset({EpisodeState.CLOSING, EpisodeState.ABORTED}),
    EpisodeState.CLOSING: frozenset({EpisodeState.FINISHED}),
    EpisodeState.LOST: frozenset(
        {EpisodeState.CLOSING, EpisodeState.SUPERSEDED, EpisodeState.ABORTED, EpisodeState.PREPARED}
    ),
    EpisodeState.FINISHED: frozenset(),
    EpisodeState.ABORTED: frozenset({EpisodeState.SUPERSEDED}),
    EpisodeState.SUPERSEDED: frozenset(),
}
WITHOUT_PLACE = frozenset({EpisodeState.FINISHED, EpisodeState.ABORTED, EpisodeState.LOST, EpisodeState.SUPERSEDED})
"""States in which an attempt no longer counts against its client's quota."""
MAX_MESSAGE = 2000
"""Characters of an ended attempt's message that are remembered; the ledger has it whole."""


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
    """Of the key that its begin was answered with."""
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
    """Its client sends heartbeats (or promised them): their absence tells."""
    idempotency_key: str = ""
    begin_digest: str = ""
    """Of the begin's body."""
    more_keys: list[str] = field(default_factory=list)
    """Digests of other keys of this attempt."""
    restored_at: float | None = None
    """Monotonic: when a restart took it up again; None for an attempt of this process."""
    begin_write: Future[None] | None = None
    """What makes the begin durable; None where that is done, and of tentative attempts."""
    lapses_at: float = 0.0
    """Monotonic, of a tentative attempt."""
    calls: set[asyncio.Task[object]] = field(default_factory=set)
    highest_versions: dict[str, int] = field(default_factory=dict)
    """Per policy that was rolled back while it ran: versions above this one count as it."""
    truncated: set[tuple[str, str]] = field(default_factory=set)
    """(policy, agent) pairs of which a turn ended for length."""
    outcome: Outcome | None = None
    cause: Cause | None = None
    """Why it ended so; None while it runs."""
    message: str = ""
    """Why it ended so, for people."""
    call_fault: Cause | None = None
    """Set while the model call that ended last failed by a fault that is not the agent's."""
    opened: float = 0.0
    """Monotonic: when it began in this process, for ``dataflow.episode_deadline_s``."""
    give_place: Callable[[], None] | None = None
    """Gives its place in its client's quota back."""
    finish_digest: str = ""
    finishing: asyncio.Task[FinishReply] | None = None
    """The write that makes the finish durable; repeats wait for it, too.  Let go once there is a reply."""
    finish_reply: FinishReply | None = None
    turn_numbers: itertools.count[int] = field(default_factory=itertools.count)
    undelivered: set[str] = field(default_factory=set)
    """Turns (begun ones, too) whose reply no caller has received."""
    in_doubt: set[str] = field(default_factory=set)
    """Turns of which nobody knows whether their caller received them, since control died about then."""
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
    captured_tools: set[str] = field(default_factory=set)
    """Digests of those that are on disk."""

    @property
    def split(self) -> Split:
        return self.group.split

    @property
    def is_unheard(self) -> bool:
        """A restart took it up, and its client has given no sign of life since."""
        return self.last_seen == self.restored_at

    @property
    def obeys_caller(self) -> bool:
        """Whether calls are sampled at the temperature and with the seed that they ask for."""
        return self.split is Split.EVAL

    @property
    def num_sampled(self) -> int:
        return self.graph.num_sampled_tokens

    @property
    def has_finish(self) -> bool:
        """A finish was taken: it is durable, or being made so."""
        return self.finishing is not None or self.finish_reply is not None

    async def finished(self) -> FinishReply:
        """What its finish was answered, or will be; a caller that hangs up does not undo it."""
        if self.finish_reply is not None:
            return self.finish_reply
        assert self.finishing is not None
        return await asyncio.shield(self.finishing)

    def new_turn_id(self, prefix: str = "chatcmpl-") -> str:
        """Response ids are unique over the server: clients key on them."""
        return f"{prefix}{self.episode_id}-{self.attempt}-{next(self.turn_numbers)}"

    def become(self, state: EpisodeState) -> None:
        """Change state.  Raises EpisodeClosed where the table forbids it."""
        if state not in TRANSITIONS[self.state]:
            raise EpisodeClosed(f"episode {self.episode_id} attempt {self.attempt} is {self.state}")
        self.state = state
        if state in WITHOUT_PLACE and self.give_place is not None:
            self.give_place()
            self.give_place = None

    def ended_by(self, cause: Cause, message: str) -> None:
        """Keep why it ended, for those who ask."""
        self.outcome, self.cause, self.message = OUTCOME_OF[cause], cause, message[-MAX_MESSAGE:]

    def require_open(self) -> None:
        """Raises EpisodeClosed unless model calls are still welcome."""
        if self.state is not EpisodeState.OPEN:
            if self.state is EpisodeState.TENTATIVE:
                raise EpisodeClosed(
                    f"episode {self.episode_id} attempt {self.attempt} was begun on trial: it takes no model calls"
                    f" before POST /api/episodes/{self.episode_id}/confirm"
                )
            raise EpisodeClosed(
                f"episode {self.episode_id} attempt {self.attempt} is {self.state}: it takes no more model calls;"
                " begin a new episode"
            )


class EpisodeRegistry:
    """Finds attempts by id and by key."""

    def __init__(self, keys: KeyRing, *, clock: Callable[[], float]) -> None:
        self.replays = ReplayBook()
        self.on_add: Callable[[OpenEpisode], None] = lambda episode: None
        """Told every attempt that begins or is restored."""
        self._keys = keys
        self._clock = clock
        self._by_key: dict[str, OpenEpisode] = {}
        self._running: dict[str, OpenEpisode] = {}
        """By episode id, those that may still finish."""
        self._ended = EndedAttempts()
        self._tentative: dict[str, OpenEpisode] = {}
        """By key digest."""

    def hold(self, episode: OpenEpisode) -> None:
        """Register a tentative attempt: until :meth:`add`, its predecessor stays the current one."""
        self._tentative[episode.key_digest] = episode
        self.on_add(episode)
        self._by_key[episode.key_digest] = episode

    def add(self, episode: OpenEpisode) -> None:
        """Register a new attempt; its predecessor, if any, can no longer count."""
        self._tentative.pop(episode.key_digest, None)
        previous = self.current(episode.episode_id)
        if previous is not None and EpisodeState.SUPERSEDED in TRANSITIONS[previous.state]:
            self.end(previous, EpisodeState.SUPERSEDED)
        episode.opened = self._clock()
        self.on_add(episode)
        self._running[episode.episode_id] = episode
        self._by_key.update(dict.fromkeys((episode.key_digest, *episode.more_keys), episode))

    def add_key(self, episode: OpenEpisode, key_digest: str) -> None:
        """Another key of the same attempt; all stay valid."""
        episode.more_keys.append(key_digest)
        self._by_key[key_digest] = episode

    def recall(self, episode: OpenEpisode) -> None:
        """An attempt that ended before this process began: it answers for a while, as others do that have ended."""
        self._remember(episode, is_current=self.current(episode.episode_id) is None)

    def lose(self, episode: OpenEpisode) -> None:
        """No sign of life: the graph stays, since a late finish may still count."""
        episode.become(EpisodeState.LOST)

    def end(self, episode: OpenEpisode, state: EpisodeState) -> None:
        """The attempt is over: its graph is let go, its end is remembered."""
        episode.become(state)
        self.remember(episode)

    def current(self, episode_id: str) -> OpenEpisode | None:
        """The newest attempt of an episode."""
        return self._running.get(episode_id) or _recalled(self._ended.current(episode_id))

    def of_key(self, key_digest: str) -> OpenEpisode | None:
        """The attempt of this key."""
        return self._by_key.get(key_digest) or _recalled(self._ended.of_key(key_digest))

    def remember(self, episode: OpenEpisode) -> None:
        """Let go of an ended attempt's tokens and answers; keep its end for later calls."""
        known = self.current(episode.episode_id)
        self._remember(episode, is_current=known is not None and known.attempt == episode.attempt)

    def _remember(self, episode: OpenEpisode, *, is_current: bool) -> None:
        self.replays.forget(episode.seen)
        let_go(episode)
        self._tentative.pop(episode.key_digest, None)
        if self._running.get(episode.episode_id) is episode:
            del self._running[episode.episode_id]
        ended = Ended.of(episode)
        for key in ended.keys:
            self._by_key.pop(key, None)
        self._ended.keep(ended, is_current=is_current, limit=REMEMBERED)

    def by_key(self, headers: Mapping[str, str], path_key: str = "") -> OpenEpisode:
        """The attempt whose key a model call carries.  Raises AuthenticationError."""
        keys = (path_key,) if path_key else keys_in(headers)
        if not keys:
            raise AuthenticationError(
                "no API key: use the `api_key` that beginning the episode returned, or a collect key"
            )
        for key in keys:
            episode = self.of_key(digest(key))
            if episode is not None:
                return episode
        raise AuthenticationError(STRANGE_KEY)

    def by_id(self, episode_id: str, headers: Mapping[str, str]) -> OpenEpisode:
        """The attempt that an episode call means: the key's own; for an admin and whoever began it the current one.

        Raises UnknownEpisode, AuthenticationError, PermissionDenied.
        """
        key = bearer(headers)
        own = self.of_key(digest(key)) if key else None
        if own is not None:
            if own.episode_id != episode_id:
                raise PermissionDenied(f"this key belongs to another episode than {episode_id!r}")
            return own
        if key.startswith(EPISODE_PREFIX):  # also where no key is needed: it must not reach another attempt
            raise AuthenticationError(STRANGE_KEY)
        caller = self._keys.require(headers, MAY_HOLD_EPISODES)
        episode = self.current(episode_id)
        is_own = episode is not None and bool(caller.key_id) and episode.client == caller.key_id
        if caller.role is not Role.ADMIN and not is_own:
            raise PermissionDenied(f"episode {episode_id!r} was not begun with this key: use the episode's own")
        if episode is None:
            raise UnknownEpisode(f"no episode {episode_id!r} is running or recently ended here")
        return episode

    def open_episodes(self) -> list[OpenEpisode]:
        """Those that run, tentative ones included."""
        running = (e for e in self._running.values() if e.state in (EpisodeState.OPEN, EpisodeState.CLOSING))
        return [*running, *self._tentative.values()]

    def lapsed(self) -> list[OpenEpisode]:
        """Tentative attempts that nobody confirmed in time."""
        now = self._clock()
        return [e for e in self._tentative.values() if e.lapses_at < now]

    def rebase(self, policy: str, *, highest: int) -> None:
        """A policy was rolled back: what attempts that may still count hold is not newer than ``highest``.

        That includes what they will sample in the new lineage: a token that seems older than it is, in an episode
        that ran through a rollback, is safer than telling the two apart.
        """
        for episode in self._running.values():
            if episode.state in (EpisodeState.OPEN, EpisodeState.LOST):
                episode.highest_versions[policy] = min(highest, episode.highest_versions.get(policy, highest))

    def silent(self, heartbeat_s: float) -> list[OpenEpisode]:
        """Open attempts that gave no sign of life for too long."""
        now = self._clock()
        lost: list[OpenEpisode] = []
        for episode in self._running.values():
            limit = episode.idle_timeout_s
            if episode.has_heartbeat:
                missed = HEARTBEATS_AFTER_RESTART if episode.is_unheard else HEARTBEATS_UNTIL_LOST
                limit = min(limit, heartbeat_s * missed)
            if episode.state is EpisodeState.OPEN and not episode.calls and now - episode.last_seen > limit:
                lost.append(episode)
        return lost


def _recalled(ended: Ended | None) -> OpenEpisode | None:
    """As it was when it ended: it answers questions and repeats, and nothing else."""
    if ended is None:
        return None
    episode = OpenEpisode(
        episode_id=ended.episode_id,
        attempt=ended.attempt,
        group=ended.group,
        policies=ended.policies,
        label=ended.label,
        key_digest=ended.key_digest,
        idle_timeout_s=0.0,
        began_s=0.0,
        last_seen=0.0,
        graph=EpisodeGraph(ended.episode_id),
        client=ended.client,
        code=ended.code,
        state=ended.state,
        more_keys=list(ended.more_keys),
        outcome=ended.outcome,
        cause=ended.cause,
        message=ended.message,
        finish_digest=ended.finish_digest,
        finish_reply=ended.finish_reply,
    )
    let_go(episode)
    return episode


def new_episode_prefix() -> str:
    """Random, so that ids of two runs never meet."""
    return f"ep-{secrets.token_hex(6)}"


def task_model(group: GroupSpec) -> TaskModel:
    return TaskModel(source=group.task.source, id=group.task.id, payload=group.task.payload)
