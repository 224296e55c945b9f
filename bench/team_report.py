"""What the runs of the team say: the bound that no schedule can beat, idle trainers, paired differences.

**The bound.**  Whatever the schedule, a run takes at least as long as each of these, so at least as long as the
longest:

    cores     the CPU seconds of all processes, divided by the cores they share
    trainer   for either policy: until ``groups_per_step`` groups have waited for their tools there is no batch,
              and then its steps follow one another
    tail      the tools of the slowest group, then the step that trains it

CPU seconds are the least that any mode needed, process by process: what a mode spends beyond that (keys and values
computed again after an update, caches shared with a neighbour) counts against it, and so does the restraint that
staleness demands.  ``compute`` is ``cores`` without control and the agent's client: what is left of the bound for who
thinks that these should cost nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.team_runs import Step, TeamRun
from bench.team_work import POLICIES, Work

ENGINE = "engine-0"
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95%, for 1 to 9 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds that a run takes at least, by cause."""

    cores: float
    trainer: float
    tail: float
    compute: float
    """Of engine and trainers alone; never above ``cores``, so no part of the bound."""

    @property
    def seconds(self) -> float:
        return max(self.cores, self.trainer, self.tail)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its 95% interval; without bounds where there is one seed only."""

    mean: float
    low: float | None
    high: float | None

    def holds(self, value: float) -> bool:
        return self.low is None or self.high is None or self.low <= value <= self.high


def work_bound(runs: Sequence[TeamRun], work: Work, *, cores: int) -> Bound:
    """Of the runs of one seed, one for each mode; ``cores`` is what all processes share."""
    needed = {name: min(run.cpu_s[name] for run in runs) for name in runs[0].cpu_s}
    paths = sorted(runs[0].group_paths_s)
    steps_s = [needed[trainer_name(policy)] for policy in POLICIES]
    return Bound(
        cores=sum(needed.values()) / cores,
        trainer=paths[work.groups_per_step - 1] + max(steps_s),
        tail=paths[-1] + max(steps_s) / work.steps,
        compute=(needed[ENGINE] + sum(steps_s)) / cores,
    )


def trainer_name(policy: str) -> str:
    """Its process, as the supervisor calls it."""
    return f"trainer-{policy}"


def idle_share(steps: Sequence[Step]) -> float:
    """Of the time from the first step's beginning to the last one's end, what a trainer spends outside of steps.

    Publishing weights is not in the step.
    """
    span = steps[-1].ended_s - steps[0].began_s
    return max(0.0, 1.0 - sum(step.train_s for step in steps) / span) if span > 0 else 0.0


def final_reward(run: TeamRun) -> float:
    """Held-out reward after training: mean over tasks, then over policies."""
    return statistics.fmean(statistics.fmean(tasks.values()) for tasks in run.rewards.values())


def reward_of(run: TeamRun, policy: str) -> float:
    return statistics.fmean(run.rewards[policy].values())


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean difference seed by seed, with Student's interval."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Interval(mean, None, None)
    margin = T_975[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - margin, mean + margin)


def by_mode(runs: Sequence[TeamRun]) -> dict[str, list[TeamRun]]:
    """The runs of each mode, in order of their seeds."""
    found: dict[str, list[TeamRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        found.setdefault(run.mode, []).append(run)
    return found


def mean_cpu(runs: Sequence[TeamRun]) -> Mapping[str, float]:
    """CPU seconds per process, mean over runs."""
    names = runs[0].cpu_s
    return {name: round(statistics.fmean(run.cpu_s.get(name, 0.0) for run in runs), 2) for name in names}
