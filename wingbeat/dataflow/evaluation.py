"""Scores one pinned policy version on fixed tasks.

Each task is a group of ``samples_per_task`` episodes in the :class:`GroupBook`, which re-attempts
failures.  What still fails is reported as missing and never scored as 0: an outage must not look
like a worse policy.

One version of the agent runs it from beginning to end, since a score of two says nothing of either.  Where that
version is replaced on the way, the evaluation begins anew, ``MAX_BEGINNINGS`` times in all; then it goes on with both.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from wingbeat.core.types import NO_VARIANT, Split, Task, Variant
from wingbeat.dataflow.records import ClosedGroup, GroupSpec

MAX_BEGINNINGS = 4
"""Whoever edits an agent all the time gets a score all the same."""


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """What is measured."""

    id: str
    policy: str
    version: int
    name: str = "eval"
    samples_per_task: int = 1
    team: tuple[str, ...] = ()
    """Other policies that the episodes may call, as ``"name"`` or ``"name@version"``."""


@dataclass(frozen=True, slots=True)
class SourceScore:
    """The part of one task source in a result."""

    mean: float | None
    stderr: float | None
    num_tasks: int
    """Tasks with a reward."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What is known so far."""

    spec: EvaluationSpec
    done: bool
    num_expected: int
    num_finished: int
    """Episodes with a reward."""
    missing: Mapping[str, int]
    """Episodes without one, by reason."""
    mean: float | None
    stderr: float | None
    """Of the mean over tasks; None with fewer than two scored tasks."""
    rewards: Mapping[str, tuple[float, ...]]
    """Per task, in order of finishing.  Keys are task ids; ``source/id`` where several sources are scored."""
    sources: Mapping[str, SourceScore] = field(default_factory=dict[str, SourceScore])
    """Per task source."""
    agents: Mapping[str, int] = field(default_factory=dict[str, int])
    """Finished episodes by version of the agent, where clients say which; more than one: they ran it together."""

    @property
    def num_missing(self) -> int:
        return sum(self.missing.values())


class Evaluation:
    """Hands out the groups of one evaluation and collects their rewards."""

    def __init__(self, spec: EvaluationSpec, tasks: Sequence[Task]) -> None:
        """Raises ValueError where there is nothing to measure or a task comes twice."""
        if not tasks or spec.samples_per_task < 1:
            raise ValueError(f"evaluation {spec.id}: expected tasks and samples_per_task >= 1, got {len(tasks)} tasks")
        has_one_source = len({task.source for task in tasks}) == 1
        self._spec = spec
        self._tasks = tuple(tasks)
        self._keys = [task.id if has_one_source else task_key(task.source, task.id) for task in tasks]
        if len(set(self._keys)) < len(self._keys):
            raise ValueError(f"evaluation {spec.id}: every task may come once, raise samples_per_task instead")
        self._waiting = list(range(len(tasks)))
        """Indices of tasks that were not handed out, in order."""
        self._pending: dict[str, str] = {}
        """Group id -> task key."""
        self._rewards: dict[str, list[float]] = {}
        self._missing: Counter[str] = Counter()
        self._withdrawn: set[str] = set()
        self._beginnings = 1
        self._given_up: set[str] = set()
        """Groups of earlier beginnings."""
        self._agents: Counter[str] = Counter()
        self.variant: Variant | None = None
        """The version of the agent that runs it; None: whichever asks first."""

    @property
    def spec(self) -> EvaluationSpec:
        return self._spec

    @property
    def sources(self) -> frozenset[str]:
        """Of its tasks."""
        return frozenset(task.source for task in self._tasks)

    @property
    def done(self) -> bool:
        """Whether every task's group was handed out and has closed."""
        return not self._waiting and not self._pending

    @property
    def waiting_sources(self) -> frozenset[str]:
        """Sources with tasks that were not handed out yet."""
        return frozenset(self._tasks[index].source for index in self._waiting)

    def next_group(self, sources: Collection[str] | None = None) -> GroupSpec | None:
        """The next task's group, to be opened in the book; None when all (of these sources) were handed out."""
        index = next((i for i in self._waiting if sources is None or self._tasks[i].source in sources), None)
        if index is None:
            return None
        self._waiting.remove(index)
        group_id = f"{self._spec.id}-{index}"
        if self._beginnings > 1:
            group_id += f".{self._beginnings}"
        self._pending[group_id] = self._keys[index]
        return GroupSpec(
            id=group_id,
            task=self._tasks[index],
            split=Split.EVAL,
            size=self._spec.samples_per_task,
            policies=(f"{self._spec.policy}@{self._spec.version}", *self._spec.team),
            evaluation_id=self._spec.id,
        )

    def is_pending(self, group_id: str) -> bool:
        """Whether this group was handed out and still counts."""
        return group_id in self._pending

    def replace_variant(self) -> tuple[str, ...] | None:
        """The version of the agent that ran it is gone: another one runs it from the beginning.

        Returns the groups that were given up; None where it has begun too often and goes on with what is missing.
        """
        self.variant = None
        if self._beginnings >= MAX_BEGINNINGS:
            return None
        given_up = tuple(self._pending)
        self._beginnings += 1
        self._given_up.update(given_up)
        for collected in (self._pending, self._rewards, self._missing, self._agents):
            collected.clear()
        self._waiting = list(range(len(self._tasks)))
        withdrawn, self._withdrawn = self._withdrawn, set()
        for source in withdrawn:
            self.withdraw(source)
        return given_up

    def withdraw(self, source: str) -> None:
        """Hand out no more tasks of a source; its episodes are reported as missing."""
        self._withdrawn.add(source)
        left = [index for index in self._waiting if self._tasks[index].source == source]
        self._waiting = [index for index in self._waiting if self._tasks[index].source != source]
        if left:
            self._missing[f"source {source} was removed"] += len(left) * self._spec.samples_per_task

    def collect(self, group: ClosedGroup) -> None:
        """Take in a closed group.  Raises ValueError where it is not pending here."""
        if group.spec.id in self._given_up:
            self._given_up.remove(group.spec.id)
            return
        key = self._pending.pop(group.spec.id, None)
        if key is None:
            raise ValueError(f"group {group.spec.id} is not pending in evaluation {self._spec.id}")
        for record in sorted(group.finished, key=lambda record: record.finished_s):
            variant = Variant(record.label, record.code)
            if variant != NO_VARIANT:
                self._agents[str(variant)] += 1
            reward = record.rewards.get(self._spec.policy)
            if reward is None:
                self._missing[f"no reward for policy {self._spec.policy}"] += 1
            else:
                self._rewards.setdefault(key, []).append(reward)
        self._missing.update(member.reason for member in (*group.given_up, *group.cut_off))

    def result(self) -> EvaluationResult:
        """Mean and standard error over tasks.

        Episodes of one task are not independent, so a task's episodes are averaged first and the
        error is that of the task means (clustered, after Miller 2024, arXiv:2411.00640, section 2.2):
        ``mean = 1/n sum_t m_t``, ``stderr = sd(m) / sqrt(n)`` with ``sd`` of ``n - 1``.  Tasks without any
        reward are left out here and stand in ``missing``.
        """
        task_means = {key: statistics.fmean(rewards) for key, rewards in self._rewards.items()}
        by_source: dict[str, list[float]] = {task.source: [] for task in self._tasks}
        for key, task in zip(self._keys, self._tasks, strict=True):
            if key in task_means:
                by_source[task.source].append(task_means[key])
        total = _score(list(task_means.values()))
        return EvaluationResult(
            spec=self._spec,
            done=self.done,
            num_expected=len(self._tasks) * self._spec.samples_per_task,
            num_finished=sum(len(rewards) for rewards in self._rewards.values()),
            missing=dict(self._missing),
            mean=total.mean,
            stderr=total.stderr,
            rewards={key: tuple(rewards) for key, rewards in self._rewards.items()},
            sources={source: _score(means) for source, means in by_source.items()},
            agents=dict(self._agents),
        )


def task_key(source: str, task_id: str) -> str:
    """``source/id``; a slash in the source is written ``%2F``, so that no two tasks have the same."""
    return f"{source.replace('%', '%25').replace('/', '%2F')}/{task_id}"


def _score(task_means: Sequence[float]) -> SourceScore:
    count = len(task_means)
    return SourceScore(
        mean=statistics.fmean(task_means) if task_means else None,
        stderr=statistics.stdev(task_means) / math.sqrt(count) if count > 1 else None,
        num_tasks=count,
    )


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """How much better the second of two evaluations is, on the tasks that both scored."""

    mean: float
    low: float
    high: float
    """``low`` and ``high`` bound the 95% interval of the mean."""
    num_tasks: int


def paired_difference(before: EvaluationResult, after: EvaluationResult) -> PairedDifference | None:
    """Compare task by task, which removes the spread between tasks (Miller 2024, arXiv:2411.00640, section 4.2).

    ``d_t`` = mean reward of task ``t`` after minus before; the interval is ``mean(d) +- 1.96 sd(d) / sqrt(n)``,
    good for the hundred tasks and more that evaluations have.  None with fewer than two common tasks.
    """
    earlier, later = _by_task(before), _by_task(after)
    return difference_of_means(
        {task: statistics.fmean(rewards) for task, rewards in earlier.items()},
        {task: statistics.fmean(rewards) for task, rewards in later.items()},
    )


def difference_of_means(before: Mapping[str, float], after: Mapping[str, float]) -> PairedDifference | None:
    """As :func:`paired_difference`, of the mean rewards by task."""
    differences = [after[task] - mean for task, mean in before.items() if task in after]
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    margin = statistics.NormalDist().inv_cdf(0.975) * statistics.stdev(differences) / math.sqrt(len(differences))
    return PairedDifference(mean, mean - margin, mean + margin, len(differences))


def _by_task(result: EvaluationResult) -> dict[str, tuple[float, ...]]:
    """The rewards by source and task also where one source was scored: others may have come or gone since."""
    if len(result.sources) != 1:
        return dict(result.rewards)
    (source,) = result.sources
    return {task_key(source, task): rewards for task, rewards in result.rewards.items()}
