"""What becomes of tokens that are too old to train: masking, dropping, and rebasing after a rollback.

A token is over-age at trainer version ``v`` where ``v - version > max_staleness``.  An episode may span
many versions (its generation goes on while weights are swapped), so usually only its first tokens are.

**Dropping** takes the whole attempt, with all its agents: its state in the ledger is one per (attempt, policy).

**Masking** takes the over-age tokens out of training and keeps the rest.  A member that is left without any
token stays in its group, without samples: its reward belongs to the baseline.  That matters more than it
seems.  A group closes with its longest episode, so where that one outlasted the bound the short ones, which
ended long before, are over-age as a whole.  Without their rewards the long episode would have nothing to be
compared with, and the very tokens that masking saves would have no advantage.  Only where a whole group is
left without tokens does it go.

Legend: ``T`` = tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from wingbeat.core.samples import FLOAT_DTYPE, INT_DTYPE, EpisodeSamples, TrainingSample
from wingbeat.dataflow.records import ReadyGroup

AttemptKey = tuple[str, int]
"""(episode id, attempt)."""


@dataclass(frozen=True, slots=True)
class Aged:
    """A group without its over-age tokens; ``group`` is None where nothing is left."""

    group: ReadyGroup | None
    dropped: tuple[EpisodeSamples, ...] = ()
    """Members of attempts that leave, as they came."""


def attempt_key(member: EpisodeSamples) -> AttemptKey:
    return member.episode_id, member.attempt


def is_over_age(member: EpisodeSamples, *, version: int, max_staleness: int) -> bool:
    """Whether some token of it is more than ``max_staleness`` versions behind ``version``."""
    lowest = member.min_version
    return lowest is not None and version - lowest > max_staleness


def drop_over_age(group: ReadyGroup, *, version: int, max_staleness: int) -> Aged:
    """Whole attempts go, with all their agents, where one token is over-age."""
    stale = {attempt_key(m) for m in group.members if is_over_age(m, version=version, max_staleness=max_staleness)}
    kept = tuple(member for member in group.members if attempt_key(member) not in stale)
    dropped = tuple(member for member in group.members if attempt_key(member) in stale)
    return Aged(replace(group, members=kept) if kept else None, dropped)


def mask_over_age(group: ReadyGroup, *, version: int, max_staleness: int) -> Aged:
    """Over-age tokens go; the group goes where that leaves it without any."""
    aged = tuple(_mask_member(member, oldest=version - max_staleness) for member in group.members)
    if any(member.num_sampled for member in aged) or not any(member.masked for member in aged):
        return Aged(replace(group, members=aged))
    return Aged(None, group.members)


def _mask_member(member: EpisodeSamples, *, oldest: int) -> EpisodeSamples:
    lowest = member.min_version
    if lowest is None or lowest >= oldest:
        return member
    samples = [mask_sample(sample, oldest=oldest) for sample in member.samples]
    masked = member.num_sampled - sum(sample.num_sampled for sample in samples)
    return msgspec.structs.replace(
        member, samples=tuple(sample for sample in samples if sample.num_sampled), masked=member.masked + masked
    )


def mask_sample(sample: TrainingSample, *, oldest: int) -> TrainingSample:
    """The sample with tokens of versions below ``oldest`` as mere context, as if they had been a prompt's.

    All arrays keep their length.  ``turn_starts`` and ``turn_ids`` keep naming the turns: their places are
    those of sampled tokens, trained or not.
    """
    sampled_T = sample.sampled_T.astype(bool)
    kept_T = sampled_T & (sample.versions_T >= oldest)
    if np.array_equal(kept_T, sampled_T):
        return sample
    index = np.where(kept_T, sample.support_index_T, -1).astype(INT_DTYPE) if sample.support_index else None
    return msgspec.structs.replace(
        sample,
        sampled=kept_T.astype(np.uint8).tobytes(),
        sampling_logprobs=np.where(kept_T, sample.sampling_logprobs_T, 0).astype(FLOAT_DTYPE).tobytes(),
        versions=np.where(kept_T, sample.versions_T, -1).astype(INT_DTYPE).tobytes(),
        support_index=b"" if index is None else index.tobytes(),
    )


def rebase_member(member: EpisodeSamples, *, highest: int) -> EpisodeSamples:
    """The member after a rollback to version ``highest``; returned as it is where nothing changes.

    Versions above it belong to a lineage that no longer counts; as far as age goes, what they sampled is as
    old as the last version that both lineages share.
    """
    samples = tuple(_rebase_sample(sample, highest=highest) for sample in member.samples)
    return msgspec.structs.replace(member, samples=samples) if samples != member.samples else member


def _rebase_sample(sample: TrainingSample, *, highest: int) -> TrainingSample:
    if not (sample.versions_T > highest).any():
        return sample
    return msgspec.structs.replace(sample, versions=np.minimum(sample.versions_T, highest).astype(INT_DTYPE).tobytes())


def by_attempt(members: Iterable[EpisodeSamples]) -> dict[AttemptKey, list[EpisodeSamples]]:
    """Members of one policy by attempt: one list holds all agents of an attempt."""
    found: dict[AttemptKey, list[EpisodeSamples]] = {}
    for member in members:
        found.setdefault(attempt_key(member), []).append(member)
    return found
