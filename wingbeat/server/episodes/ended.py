"""What an ended attempt keeps in memory: who it was and how it ended.

Thousands of them are remembered, each in well under a kilobyte and out of the collector's sight: an :class:`Ended` and
its places in two tables.  The attempt itself goes with the last straggler of it (a call that is being cancelled, a
stream whose caller reads slowly), which may still write to its containers: they stay empty.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from wingbeat.core.protocol import FinishReply
from wingbeat.core.types import Cause, Outcome
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.calls.replays import Fingerprint, SeenCalls
from wingbeat.tracking.graph import EpisodeGraph

if TYPE_CHECKING:
    from wingbeat.server.calls.runs import Run
    from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode


class _Nothing(set[Any]):
    """Stays empty."""

    def add(self, element: Any) -> None:
        """Forgotten at once."""

    def update(self, *others: Any) -> None:
        """Forgotten at once."""


class _NoCalls(SeenCalls):
    """Remembers no call."""

    def add(self, fingerprint: Fingerprint, run: Run) -> None:
        """Forgotten at once."""


_NOTHING, _NO_CALLS, _NO_GRAPH = _Nothing(), _NoCalls(), EpisodeGraph("")
DISTINCT_POLICIES = 256


class Reply(msgspec.Struct, frozen=True, gc=False):
    """What a finish was answered, but for whose it was."""

    num_turns: int
    num_sampled_tokens: int
    warning: str


class Ended(msgspec.Struct, frozen=True, gc=False):
    """An attempt that is over.  Nothing that it refers to knows of it, so there is no cycle for a collector to find."""

    episode_id: str
    attempt: int
    group: GroupSpec
    policies: dict[str, int | None]
    """One object for all that may call the same."""
    label: str
    client: str
    code: str
    key_digest: str
    more_keys: tuple[str, ...]
    state: EpisodeState
    outcome: Outcome | None
    cause: Cause | None
    message: str
    finish_digest: str
    reply: Reply | None
    """Of a finish that counts."""

    @classmethod
    def of(cls, episode: OpenEpisode) -> Ended:
        """Names that many attempts have are kept once."""
        reply = episode.finish_reply
        return cls(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            group=episode.group,
            policies=_shared(tuple(episode.policies.items())),
            label=sys.intern(episode.label),
            client=sys.intern(episode.client),
            code=sys.intern(episode.code),
            key_digest=episode.key_digest,
            more_keys=tuple(episode.more_keys),
            state=episode.state,
            outcome=episode.outcome,
            cause=episode.cause,
            message=episode.message,
            finish_digest=episode.finish_digest,
            reply=None if reply is None else Reply(reply.num_turns, reply.num_sampled_tokens, reply.warning),
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """Digests of all of them."""
        return (self.key_digest, *self.more_keys)

    @property
    def finish_reply(self) -> FinishReply | None:
        """As it was answered."""
        if self.reply is None:
            return None
        return FinishReply(
            episode_id=self.episode_id,
            attempt=self.attempt,
            state=self.state,
            num_turns=self.reply.num_turns,
            num_sampled_tokens=self.reply.num_sampled_tokens,
            warning=self.reply.warning,
        )


@lru_cache(maxsize=DISTINCT_POLICIES)
def _shared(policies: tuple[tuple[str, int | None], ...]) -> dict[str, int | None]:
    return dict(policies)


class EndedAttempts:
    """Those that ended last, by key and by episode."""

    def __init__(self) -> None:
        self._by_key: dict[str, Ended] = {}
        self._current: dict[str, Ended] = {}
        """By episode id, the newest attempt that ended."""
        self._order: deque[Ended] = deque()
        """Oldest first; one that changed since stands here as it was, too."""

    def __len__(self) -> int:
        return len(self._order)

    def of_key(self, key_digest: str) -> Ended | None:
        return self._by_key.get(key_digest)

    def current(self, episode_id: str) -> Ended | None:
        return self._current.get(episode_id)

    def keep(self, ended: Ended, *, is_current: bool, limit: int) -> None:
        """Remember it, and forget the oldest over ``limit``."""
        self._order.append(ended)
        self._by_key.update(dict.fromkeys(ended.keys, ended))
        if is_current:
            self._current[ended.episode_id] = ended
        while len(self._order) > limit:
            old = self._order.popleft()
            for key in old.keys:
                _drop(self._by_key, key, old)
            _drop(self._current, old.episode_id, old)


def _drop(table: dict[str, Ended], key: str, ended: Ended) -> None:
    if table.get(key) is ended:
        del table[key]


def let_go(episode: OpenEpisode) -> None:
    """Free its tokens, its marks and its bookkeeping; who still has work on it holds what that needs."""
    episode.graph, episode.seen, episode.finishing = _NO_GRAPH, _NO_CALLS, None
    episode.calls = episode.truncated = episode.instructed = episode.captured_tools = _NOTHING
    episode.undelivered = episode.in_doubt = episode.resampled = _NOTHING
    episode.highest_versions, episode.tools_by_digest = {}, {}
