"""What the versions of an agent did in a run, by label and code."""

from __future__ import annotations

import math
import sqlite3
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from wingbeat.core.types import Split, Variant
from wingbeat.dataflow.evaluation import PairedDifference, difference_of_means, task_key


@dataclass(slots=True)
class AgentVersionReport:
    """One version in one split of a run."""

    variant: Variant
    split: Split
    endings: Counter[str] = field(default_factory=Counter[str])
    """Attempts by how they ended: the outcome of those that finished or were aborted, else their state."""
    tokens: int = 0
    """Sampled by finished attempts."""
    seconds: float = 0.0
    """Of finished attempts, all together."""
    first_s: float = math.inf
    last_s: float = 0.0
    """Wall clock: when its first attempt began, and when the last one began or ended."""
    rewards: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])
    """Policy to task to the rewards of its finished episodes."""

    @property
    def num_attempts(self) -> int:
        return self.endings.total()

    def task_means(self, policy: str) -> dict[str, float]:
        return {task: statistics.fmean(rewards) for task, rewards in self.rewards.get(policy, {}).items()}

    def mean(self, policy: str) -> float | None:
        """Of all its episodes."""
        rewards = [reward for own in self.rewards.get(policy, {}).values() for reward in own]
        return statistics.fmean(rewards) if rewards else None

    def stderr(self, policy: str) -> float | None:
        """Of the mean, clustered by task (Miller 2024, arXiv:2411.00640, section 2.2); None with one task.

        ``sqrt(sum_t (sum_i (r_ti - mean))^2) / n``, with ``r_ti`` the rewards of task ``t`` and ``n`` all of them.
        """
        mean, clusters = self.mean(policy), list(self.rewards.get(policy, {}).values())
        if mean is None or len(clusters) < 2:
            return None
        squares = math.fsum(math.fsum(reward - mean for reward in own) ** 2 for own in clusters)
        return math.sqrt(squares) / sum(map(len, clusters))

    def difference(self, policy: str, before: AgentVersionReport) -> PairedDifference | None:
        """To another version, task by task; None with fewer than two tasks that both had."""
        return difference_of_means(before.task_means(policy), self.task_means(policy))


def agent_versions(db: sqlite3.Connection) -> tuple[AgentVersionReport, ...]:
    """All attempts of a run, in the order in which their versions began."""
    rows = db.execute(
        """SELECT e.label, e.code, g.split, e.state, e.outcome, e.rewards, e.num_sampled, e.created_s, e.finished_s,
            t.source, t.id
        FROM episodes e JOIN groups g USING (group_id) JOIN tasks t USING (task_key) ORDER BY e.rowid"""
    )
    found: dict[tuple[Variant, Split], AgentVersionReport] = {}
    for row in rows:
        key = Variant(row["label"], row["code"]), Split(row["split"])
        report = found.setdefault(key, AgentVersionReport(*key))
        _count(report, row)
    return tuple(found.values())


def _count(report: AgentVersionReport, row: sqlite3.Row) -> None:
    has_outcome = row["state"] in ("finished", "aborted") and row["outcome"] is not None
    report.endings[row["outcome"] if has_outcome else row["state"]] += 1
    report.first_s = min(report.first_s, row["created_s"])
    report.last_s = max(report.last_s, row["created_s"], row["finished_s"] or 0.0)
    if row["state"] != "finished" or row["outcome"] != "agent":
        return
    report.tokens += row["num_sampled"]
    report.seconds += max(0.0, row["finished_s"] - row["created_s"])
    rewards: Mapping[str, float] = msgspec.json.decode(row["rewards"] or "{}", type=dict[str, float])
    task = task_key(row["source"], row["id"])
    for policy, reward in rewards.items():
        if ":" not in policy:
            report.rewards.setdefault(policy, {}).setdefault(task, []).append(reward)


def predecessor(versions: tuple[AgentVersionReport, ...], index: int) -> AgentVersionReport | None:
    """The version before it under the same label, else the version before it, in the same split."""
    own = versions[index]
    earlier = [version for version in versions[:index] if version.split is own.split]
    same_label = [version for version in earlier if version.variant.label == own.variant.label]
    return next(reversed(same_label or earlier), None)
