"""What an ended attempt keeps in memory: who it was and how it ended.

Thousands of them are remembered, so what they no longer need they share: containers that stay empty.  A straggler of
the attempt (a call that is being cancelled, a stream whose caller reads slowly) may still write to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.server.calls.replays import Fingerprint, SeenCalls
from wingbeat.tracking.graph import EpisodeGraph

if TYPE_CHECKING:
    from wingbeat.server.calls.runs import Run
    from wingbeat.server.episodes.registry import OpenEpisode


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


def let_go(episode: OpenEpisode) -> None:
    """Free its tokens, its marks and its bookkeeping; who still has work on it holds what that needs."""
    episode.graph, episode.seen, episode.finishing = _NO_GRAPH, _NO_CALLS, None
    episode.calls = episode.truncated = episode.instructed = episode.captured_tools = _NOTHING
    episode.undelivered = episode.in_doubt = episode.resampled = _NOTHING
    episode.highest_versions, episode.tools_by_digest = {}, {}
