"""Groups that earlier batches trained, for operators that train them again.

Everything here follows from the logged batches and from what was erased, so a restart rebuilds it from the ledger
and nothing of it has to be saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from wingbeat.core.samples import EpisodeSamples, TrainingBatch
from wingbeat.dataflow.aging import AttemptKey, attempt_key
from wingbeat.dataflow.operators.views import PastGroup, view_episodes


@dataclass(slots=True)
class _Kept:
    group_id: str
    step: int
    members: tuple[EpisodeSamples, ...]
    min_version: int
    uses: int = 0


class PastGroups:
    """Of one policy, as long as its tokens are young enough to train."""

    def __init__(self, *, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._groups: dict[str, _Kept] = {}

    def rebuild(self, batches: Iterable[TrainingBatch], *, erased: Collection[AttemptKey] = ()) -> None:
        """Forget everything, then note logged batches in the order of their steps, without what was ``erased``."""
        self._groups.clear()
        for batch in batches:
            left = [member for member in batch.episodes if attempt_key(member) not in erased]
            self.note(batch.step, left, replayed=batch.replayed)

    def forget(self, group_id: str) -> None:
        """Harmless for a group that is not remembered."""
        self._groups.pop(group_id, None)

    def note(self, step: int, members: Sequence[EpisodeSamples], *, replayed: Sequence[tuple[str, int]]) -> None:
        """A batch: its new groups are remembered, its repeated ones have been used once more."""
        again = set(replayed)
        fresh: dict[str, list[EpisodeSamples]] = {}
        used: set[str] = set()
        for member in members:
            if (member.episode_id, member.attempt) in again:
                used.add(member.group_id)
            else:
                fresh.setdefault(member.group_id, []).append(member)
        for group_id in used & self._groups.keys():
            self._groups[group_id].uses += 1
        for group_id, own in fresh.items():
            versions = [v for member in own if (v := member.min_version) is not None]
            if versions:
                self._groups[group_id] = _Kept(group_id, step, tuple(own), min(versions))

    def eligible(self, version: int, *, excluded: Iterable[EpisodeSamples] = ()) -> dict[str, PastGroup]:
        """What may train at ``version``, oldest step first; older groups are forgotten.

        ``excluded`` are members that the batch holds already: an attempt trains once in a batch.
        """
        self._groups = {
            key: kept for key, kept in self._groups.items() if version - kept.min_version <= self._max_staleness
        }
        taken = {(member.episode_id, member.attempt) for member in excluded}
        return {
            kept.group_id: PastGroup(
                id=kept.group_id,
                step=kept.step,
                uses=kept.uses,
                staleness=version - kept.min_version,
                episodes=view_episodes(kept.members),
            )
            for kept in self._groups.values()
            if not any((m.episode_id, m.attempt) in taken for m in kept.members)
        }

    def members(self, group_id: str) -> tuple[EpisodeSamples, ...]:
        """What the group trained with."""
        return self._groups[group_id].members
