"""Training metrics by task source: what a mix of tasks hides in its mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wingbeat.core.samples import TrainingBatch
from wingbeat.dataflow.dealer import SourcePlace
from wingbeat.dataflow.records import EpisodeRecord


@dataclass(slots=True)
class _Seen:
    """Finished training episodes of one policy and source since its last step."""

    rewards: list[float] = field(default_factory=list[float])
    num_tokens: int = 0


class SourceMeter:
    """Collects what ends, and tells it with each step."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, _Seen]] = {}
        """Policy to source."""

    def finished(self, record: EpisodeRecord, *, source: str, policies: Sequence[str]) -> None:
        """A training episode counted; ``policies`` are its trainable ones."""
        for policy in policies:
            if policy in record.rewards:
                seen = self._seen.setdefault(policy, {}).setdefault(source, _Seen())
                seen.rewards.append(record.rewards[policy])
                seen.num_tokens += sum(s.num_sampled for s in record.samples if s.policy == policy)

    def step(self, policy: str, batch: TrainingBatch | None, places: Mapping[str, SourcePlace]) -> dict[str, float]:
        """The metrics of a policy's step, by source.

        ``rollout/reward_mean/S``, ``rollout/episodes/S`` and ``rollout/sampled_tokens/S``: of the episodes that
        finished since its last step; ``groups/trained/S``: of its batch; ``groups/share/S``: of all groups that
        counted so far.
        """
        values: dict[str, float] = {}
        for source, seen in self._seen.pop(policy, {}).items():
            values[f"rollout/reward_mean/{source}"] = sum(seen.rewards) / len(seen.rewards)
            values[f"rollout/episodes/{source}"] = float(len(seen.rewards))
            values[f"rollout/sampled_tokens/{source}"] = float(seen.num_tokens)
        groups = {(member.source, member.group_id) for member in batch.episodes} if batch is not None else set()
        for source in {source for source, _ in groups} | set(places):
            values[f"groups/trained/{source}"] = float(sum(source == of for of, _ in groups))
        values |= {f"groups/share/{source}": place.share for source, place in places.items()}
        return values
