"""Groups of one policy that wait to be trained, oldest floor first.

Oldest first is earliest deadline first: it is what the staleness gate's proof assumes, and it keeps
long episodes, whose groups close late, from being overtaken until they are too old.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass

from wingbeat.core.errors import ConflictError
from wingbeat.core.samples import EpisodeSamples
from wingbeat.dataflow.operators import Filtered, filter_no_tokens, filter_stale, filter_zero_variance
from wingbeat.dataflow.records import Dropped, DropReason, ReadyGroup


@dataclass(frozen=True, slots=True)
class BatchDraft:
    """The content of one optimiser step, before it gets an id, a step number and a seed."""

    episodes: tuple[EpisodeSamples, ...]
    """Never without a sampled token."""
    group_ids: tuple[str, ...]
    """Every group that counts, also those that count without being trained."""
    dropped: tuple[Dropped, ...]
    """Members that left the buffer since the last draft and train nowhere; log them with the batch."""

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)


@dataclass(frozen=True, slots=True)
class DiscardCount:
    """What was generated and not trained."""

    num_episodes: int = 0
    num_tokens: int = 0
    """Sampled tokens."""


class PolicyBuffer:
    """The buffer of one policy.

    Groups whose rewards are all equal have no advantage to learn from.  With ``drop_zero_variance``
    they count towards ``groups_per_step`` but are not trained; with ``dynamic_sampling`` (DAPO,
    arXiv:2503.14476, eq. 11) they do not count either; with neither they are trained like others.
    ``dynamic_sampling`` implies the dropping.  Either way they are discards of reason ``zero_variance``.
    """

    def __init__(
        self,
        policy: str,
        *,
        groups_per_step: int,
        max_staleness: int,
        drop_zero_variance: bool = True,
        dynamic_sampling: bool = False,
    ) -> None:
        self._policy = policy
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._drop_zero_variance = drop_zero_variance
        self._dynamic_sampling = dynamic_sampling
        self._groups: list[ReadyGroup] = []
        self._dropped: list[Dropped] = []
        self._discards: dict[DropReason, DiscardCount] = {}

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._groups)

    @property
    def discards(self) -> Mapping[DropReason, DiscardCount]:
        """Totals since the start, by reason."""
        return dict(self._discards)

    def floors(self) -> list[int]:
        """Floor versions of the waiting groups, ascending, for the staleness gate."""
        return [group.floor_version for group in self._groups]

    def add(self, group: ReadyGroup) -> None:
        """Let a closed group wait for its step.

        A group that could never train (no sampled token; with dynamic sampling, zero variance) is
        discarded at once.  Raises ValueError for another policy's group, ConflictError for a repeat.
        """
        if group.policy != self._policy:
            raise ValueError(f"buffer of policy {self._policy!r} got group {group.group_id} of {group.policy!r}")
        if any(group.group_id == waiting.group_id for waiting in self._groups):
            raise ConflictError(f"group {group.group_id} waits in the buffer of {self._policy!r} already")
        kept = self._keep(filter_no_tokens(group))
        if kept is not None and self._dynamic_sampling:
            kept = self._keep(filter_zero_variance(kept))
        if kept is not None:
            insort(self._groups, kept, key=lambda waiting: waiting.floor_version)

    def take(self, version: int) -> BatchDraft | None:
        """The next batch if trained at ``version``, or None until ``groups_per_step`` groups count.

        First every over-age member goes (versions only grow, so it could never train later), then
        the groups with the lowest floors are taken; equal floors leave in order of arrival.  A batch in
        which no group would train is no step: its groups are discarded and the next ones are taken.
        """
        self._drop_stale(version)
        while len(self._groups) >= self._groups_per_step:
            taken = self._groups[: self._groups_per_step]
            del self._groups[: self._groups_per_step]
            trained = [self._keep(filter_zero_variance(g)) if self._drop_zero_variance else g for g in taken]
            episodes = tuple(member for group in trained if group is not None for member in group.members)
            if episodes:
                return BatchDraft(episodes, group_ids=tuple(g.group_id for g in taken), dropped=self.drain_dropped())
        return None

    def drain_dropped(self) -> tuple[Dropped, ...]:
        """Drops that no draft has carried yet: to be recorded on their own when no batch comes for long."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _drop_stale(self, version: int) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            filtered = filter_stale(group, version=version, max_staleness=self._max_staleness)
            kept = self._keep(filtered)
            if kept is not None and filtered.dropped:
                kept = self._keep(filter_no_tokens(kept))
                if kept is not None and self._dynamic_sampling:
                    kept = self._keep(filter_zero_variance(kept))
            if kept is not None:
                self._groups.append(kept)

    def _keep(self, filtered: Filtered) -> ReadyGroup | None:
        """Count what a filter dropped; returns what it kept."""
        if filtered.reason is None:
            return filtered.group
        drops = {(m.episode_id, m.attempt): Dropped(m.episode_id, m.attempt, filtered.reason) for m in filtered.dropped}
        self._dropped.extend(drops.values())
        before = self._discards.get(filtered.reason, DiscardCount())
        self._discards[filtered.reason] = DiscardCount(
            num_episodes=before.num_episodes + len(drops),
            num_tokens=before.num_tokens + sum(member.num_sampled for member in filtered.dropped),
        )
        return filtered.group
