"""Groups of one policy that wait to be trained, oldest floor first.

Oldest first is earliest deadline first: it is what the staleness gate's proof assumes, and it keeps
long episodes, whose groups close late, from being overtaken until they are too old.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from wingbeat.core.errors import ConflictError
from wingbeat.core.samples import EpisodeSamples
from wingbeat.dataflow.aging import (
    Aged,
    AttemptKey,
    attempt_key,
    by_attempt,
    drop_over_age,
    is_over_age,
    mask_over_age,
)
from wingbeat.dataflow.operators import VarianceRule, has_zero_variance
from wingbeat.dataflow.records import Dropped, DropReason, ReadyGroup
from wingbeat.dataflow.step_rule import Straggler
from wingbeat.dataflow.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class BatchDraft:
    """The content of one optimiser step, before it gets an id, a step number and a seed."""

    episodes: tuple[EpisodeSamples, ...]
    """Never without a sampled token."""
    group_ids: tuple[str, ...]
    """Every group that counts, also those that count without being trained."""
    dropped: tuple[Dropped, ...]
    """Members that left the buffer since the last draft and train nowhere; log them with the batch."""
    replayed: tuple[AttemptKey, ...] = ()
    """(episode id, attempt) of those episodes that an earlier batch trained already."""

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)


Compose = Callable[[BatchDraft, int], BatchDraft]
"""(draft, version at which it trains) -> the draft that trains: may add replayed members, or drop some."""


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
        straggler: Straggler = "wait",
        drop_zero_variance: bool = True,
        dynamic_sampling: bool = False,
        variance: VarianceRule | None = None,
        compose: Compose | None = None,
    ) -> None:
        """``straggler`` says what happens to over-age tokens: with ``drop`` their episodes go whole.

        ``variance`` says which rewards are compared; by default those of whole episodes.
        """
        self._policy = policy
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._age = drop_over_age if straggler == "drop" else mask_over_age
        self._drop_zero_variance = drop_zero_variance
        self._dynamic_sampling = dynamic_sampling
        self._variance = VarianceRule() if variance is None else variance
        self._compose = compose
        self._groups: list[ReadyGroup] = []
        self._dropped: list[Dropped] = []
        self._discards: dict[str, DiscardCount] = {}
        self._tokens = TokenCounts()
        self.was_called = False
        """Whether some group closed with members of this policy, since the start of this process."""

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._groups)

    @property
    def discards(self) -> Mapping[str, DiscardCount]:
        """Totals since the start of this process, by reason."""
        return dict(self._discards)

    @property
    def num_masked(self) -> int:
        """Tokens of trained episodes that were taken out for their age, since the start of this process."""
        return self._tokens.num_masked

    def token_metrics(self) -> dict[str, float]:
        """Trained, masked and discarded tokens by episode-length decile (docs/reference/metrics.md)."""
        return self._tokens.metrics()

    def floors(self) -> list[int]:
        """Floor versions of the waiting groups, ascending, for the staleness gate."""
        return [group.floor_version for group in self._groups]

    def add(self, group: ReadyGroup) -> bool:
        """Let a closed group wait for its step; False where it could never train and so does not wait.

        A group that could never train (no sampled token; with dynamic sampling, zero variance) is
        discarded at once.  Raises ValueError for another policy's group, ConflictError for a repeat.
        """
        if group.policy != self._policy:
            raise ValueError(f"buffer of policy {self._policy!r} got group {group.group_id} of {group.policy!r}")
        if any(group.group_id == waiting.group_id for waiting in self._groups):
            raise ConflictError(f"group {group.group_id} waits in the buffer of {self._policy!r} already")
        self.was_called = True
        self._tokens.observe(group.members)
        kept = self._with_signal(group)
        if kept is not None:
            insort(self._groups, kept, key=lambda waiting: waiting.floor_version)
        return kept is not None

    def remove(self, group_id: str) -> bool:
        """Take one group out, whose members are not to be trained any more; False where it does not wait here."""
        left = [group for group in self._groups if group.group_id != group_id]
        was_there = len(left) < len(self._groups)
        self._groups = left
        return was_there

    def count_dropped(self, group: ReadyGroup, dropped: Iterable[Dropped]) -> None:
        """Count members that left ``group`` before they got here; who dropped them also records it."""
        self.was_called = True
        agents = by_attempt(group.members)
        for one in dropped:
            leaving = agents.get((one.episode_id, one.attempt), [])
            self._tokens.observe(leaving)
            self._count(leaving, one.reason)

    def take(self, version: int) -> BatchDraft | None:
        """The next batch if trained at ``version``, or None until ``groups_per_step`` groups count.

        First every over-age token goes (versions only grow, so it could never train later), then
        the groups with the lowest floors are taken; equal floors leave in order of arrival.  A batch in
        which no group would train is no step: its groups are discarded and the next ones are taken.
        """
        self._age_all(version)
        while len(self._groups) >= self._groups_per_step:
            taken = self._groups[: self._groups_per_step]
            del self._groups[: self._groups_per_step]
            trained = [self._with_variance(group) if self._drop_zero_variance else group for group in taken]
            episodes = tuple(member for group in trained if group is not None for member in group.members)
            if not episodes:
                continue
            draft = BatchDraft(episodes, group_ids=tuple(g.group_id for g in taken), dropped=self.drain_dropped())
            composed = self._composed(draft, version=version)
            if composed is not None:
                return composed
        return None

    def drain_dropped(self) -> tuple[Dropped, ...]:
        """Drops that no draft has carried yet: to be recorded on their own when no batch comes for long."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def clear(self) -> tuple[ReadyGroup, ...]:
        """Take all waiting groups out, lowest floor first, for whoever will add them again (a rollback)."""
        groups, self._groups = tuple(self._groups), []
        return groups

    def _age_all(self, version: int) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            aged = self._age(group, version=version, max_staleness=self._max_staleness)
            kept = self._left_by(aged)
            if kept is not None and aged.dropped:
                kept = self._with_signal(kept)
            if kept is not None:
                self._groups.append(kept)

    def _left_by(self, aged: Aged) -> ReadyGroup | None:
        self._discard(aged.dropped, DropReason.STALE)
        return aged.group

    def _with_signal(self, group: ReadyGroup) -> ReadyGroup | None:
        """The group, or None where it can never train and so does not count."""
        if not any(member.num_sampled for member in group.members):
            self._discard(group.members, DropReason.NO_TOKENS)
            return None
        return self._with_variance(group) if self._dynamic_sampling else group

    def _with_variance(self, group: ReadyGroup) -> ReadyGroup | None:
        """The group, or None where all its advantages would be 0.

        Groups of size 1 pass: they have no baseline within the group, so their reward itself is the signal.
        """
        if group.size == 1 or not has_zero_variance(group, self._variance):
            return group
        self._discard(group.members, DropReason.ZERO_VARIANCE)
        return None

    def _discard(self, members: Collection[EpisodeSamples], reason: DropReason) -> None:
        if members:
            self._dropped.extend(Dropped(*key, reason) for key in by_attempt(members))
            self._count(members, reason)

    def _count(self, members: Collection[EpisodeSamples], reason: str) -> None:
        before = self._discards.get(reason, DiscardCount())
        self._discards[reason] = DiscardCount(
            num_episodes=before.num_episodes + len(by_attempt(members)),
            num_tokens=before.num_tokens + self._tokens.discarded(members, reason),
        )

    def _composed(self, draft: BatchDraft, *, version: int) -> BatchDraft | None:
        """The draft as the operators leave it, checked and counted; None where they leave no token."""
        composed = draft if self._compose is None else self._compose(draft, version)
        before = by_attempt(draft.episodes)
        after = {attempt_key(member) for member in composed.episodes}
        reasons = {(one.episode_id, one.attempt): one.reason for one in composed.dropped}
        _check(composed, before=before.keys(), reasons=reasons.keys())
        for member in composed.episodes:
            if is_over_age(member, version=version, max_staleness=self._max_staleness):
                raise ValueError(
                    f"episode {member.episode_id} is of version {member.min_version}: too old to train at {version} "
                    f"with max_staleness {self._max_staleness}; an operator added it"
                )
        for key in before.keys() - after:
            self._count(before[key], reasons[key])
        self._tokens.trained(m for m in composed.episodes if attempt_key(m) in before)
        if not any(member.num_sampled for member in composed.episodes):
            self._dropped.extend(composed.dropped)
            return None
        return composed


def _check(composed: BatchDraft, *, before: Collection[AttemptKey], reasons: Collection[AttemptKey]) -> None:
    """Raises ValueError where operators invented, repeated or lost a member of a draft."""
    parts = [(*attempt_key(member), member.agent) for member in composed.episodes]
    after, replayed = {attempt_key(member) for member in composed.episodes}, set(composed.replayed)
    added, lost = after - set(before), set(before) - after
    if len(set(parts)) < len(parts) or added != replayed or not lost <= set(reasons) or after & set(reasons):
        raise ValueError(
            f"an operator must keep or drop every member of a batch, and add replayed ones only: repeated "
            f"{len(parts) - len(set(parts))}, added {sorted(added)}, of those replayed {sorted(replayed)}, "
            f"left out without a reason {sorted(lost - set(reasons))}"
        )
