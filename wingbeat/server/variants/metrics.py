"""What the versions of an agent achieve: counts and rewards by label and code, for people and Prometheus."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wingbeat.core.types import CODE_SHOWN, Split, Variant

SHOWN = 20
"""Versions with a series of their own; a run in which code is edited all day has many more."""
OTHER = "other"


@dataclass(slots=True)
class VariantStats:
    """One version since this process began."""

    endings: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Attempts by (split, outcome)."""
    rewards: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Finished episodes with a reward, by (split, policy)."""
    reward_sums: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def add(self, other: VariantStats) -> None:
        self.endings.update(other.endings)
        self.rewards.update(other.rewards)
        for key, total in other.reward_sums.items():
            self.reward_sums[key] = self.reward_sums.get(key, 0.0) + total


class VariantMeter(Collector):
    """Bounded: beyond ``SHOWN`` versions, those that ended an attempt longest ago become one, "other"."""

    def __init__(self) -> None:
        self._stats: OrderedDict[Variant, VariantStats] = OrderedDict()
        """The one that ended an attempt last stands last."""
        self._other = VariantStats()
        self._steps: dict[str, dict[str, tuple[int, float]]] = {}
        """Policy to name to number and sum of the rewards of training episodes since the policy's last step."""
        self._only: Variant | None = None
        """The version of all training episodes so far, while there is one only."""
        self._has_several = False

    def ended(self, variant: Variant, split: Split, outcome: str, rewards: Mapping[str, float] | None = None) -> None:
        """An attempt is over; ``rewards`` by policy are of one that counts."""
        stats = self._stats.setdefault(variant, VariantStats())
        self._stats.move_to_end(variant)
        stats.endings[(split, outcome)] += 1
        for policy, reward in (rewards or {}).items():
            key = (str(split), policy)
            stats.rewards[key] += 1
            stats.reward_sums[key] = stats.reward_sums.get(key, 0.0) + reward
            if split is Split.TRAIN and variant.name:
                self._note(policy, variant.name, reward)
        self._has_several = self._has_several or self._only not in (None, variant)
        self._only = variant
        while len(self._stats) > SHOWN:
            _, oldest = self._stats.popitem(last=False)
            self._other.add(oldest)

    def _note(self, policy: str, name: str, reward: float) -> None:
        """For the policy's next step; of the names that come, the newest are kept."""
        names = self._steps.setdefault(policy, {})
        count, total = names.pop(name, (0, 0.0))
        names[name] = (count + 1, total + reward)
        if len(names) > SHOWN:
            del names[next(iter(names))]

    def stats(self) -> dict[Variant, VariantStats]:
        """The newest last."""
        return dict(self._stats)

    def step(self, policy: str) -> dict[str, float]:
        """``rollout/reward_mean@NAME`` and ``rollout/episodes@NAME`` of the training episodes since its last step.

        A single version without a label needs no name: what it does is what the run does.
        """
        values: dict[str, float] = {}
        names = self._steps.pop(policy, {})
        if not self._has_several and (self._only is None or not self._only.label):
            return values
        for name, (count, total) in names.items():
            values[f"rollout/reward_mean@{name}"] = total / count
            values[f"rollout/episodes@{name}"] = float(count)
        return values

    def collect(self) -> Iterable[Metric]:
        """For Prometheus."""
        endings = CounterMetricFamily(
            "wingbeat_agent_episodes",
            "Attempts ended, by version of the agent.",
            labels=["label", "code", "split", "outcome"],
        )
        rewards = SummaryMetricFamily(
            "wingbeat_agent_reward",
            "Rewards of finished episodes, by version of the agent.",
            labels=["label", "code", "split", "policy"],
        )
        shown = [((v.label, v.code[:CODE_SHOWN]), stats) for v, stats in self._stats.items()]
        shown += [((OTHER, OTHER), self._other)] if self._other.endings else []
        for names, stats in shown:
            for (split, outcome), count in stats.endings.items():
                endings.add_metric([*names, split, outcome], count)
            for (split, policy), count in stats.rewards.items():
                rewards.add_metric([*names, split, policy], count, stats.reward_sums[(split, policy)])
        return [endings, rewards]
