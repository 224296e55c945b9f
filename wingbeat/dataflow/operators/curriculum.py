"""Built-in curricula: which tasks are worth another group.

They learn from every group as it closed, before any operator acts on it, so their place in the chain
does not matter.  A task that nothing is known about is always issued.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import Field

from wingbeat.core.types import Task
from wingbeat.dataflow.operators.base import Operator, OperatorContext, OperatorOptions, task_key
from wingbeat.dataflow.operators.filters import check_compares
from wingbeat.dataflow.operators.views import EpisodeView, GroupView


class ScoreOptions(OperatorOptions):
    """How the score of a task is kept."""

    weight: float = Field(
        default=0.3, gt=0, le=1, description="Of the newest group in the moving average: a = (1 - weight) a + weight x."
    )
    success: float | None = Field(
        default=None,
        description="x is the share of episodes with at least this reported reward; unset: the mean reported reward.",
    )


ScoreOptionsT = TypeVar("ScoreOptionsT", bound=ScoreOptions)


@dataclass(slots=True)
class Score:
    """What is known of a task."""

    average: float
    groups: int = 1
    asked: int = 0
    """How often chance decided about it."""


class ScoreCurriculum(Operator[ScoreOptionsT]):
    """Base of curricula that follow an exponentially weighted moving average (EWMA) of each task."""

    def __init__(self, options: ScoreOptionsT, context: OperatorContext) -> None:
        super().__init__(options, context)
        self._scores: dict[str, Score] = {}

    def observe(self, group: GroupView) -> None:
        key, newest = task_key(group.task), self._value(group.episodes)
        known = self._scores.get(key)
        if known is None:
            self._scores[key] = Score(newest)
            return
        weight = self.options.weight
        known.average = (1.0 - weight) * known.average + weight * newest
        known.groups += 1

    def _value(self, episodes: tuple[EpisodeView, ...]) -> float:
        bar = self.options.success
        values = [e.reported if bar is None else float(e.reported >= bar) for e in episodes]
        return sum(values) / len(values)

    def score(self, task: Task) -> Score | None:
        """None where no group on this task has closed."""
        return self._scores.get(task_key(task))

    def chance(self, task: Task, score: Score, probability: float) -> bool:
        """True with this probability; the same each time the run comes to the same point."""
        if probability >= 1.0:
            return True
        score.asked += 1
        return self.context.random(task_key(task), score.asked).random() < probability

    def state_dict(self) -> Mapping[str, Any]:
        return {"scores": {key: (s.average, s.groups, s.asked) for key, s in self._scores.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scores = {key: Score(*values) for key, values in state["scores"].items()}

    def metrics(self) -> Mapping[str, float]:
        known = [score.average for score in self._scores.values()]
        return {"tasks": float(len(known)), "score_mean": sum(known) / len(known) if known else 0.0}


class SolvedOptions(ScoreOptions):
    """When a task is solved."""

    threshold: float = Field(default=0.95, description="The score from which a task counts as solved.")
    min_groups: int = Field(default=1, ge=1, description="Groups before a task may count as solved.")
    recheck: float = Field(default=0.02, ge=0, le=1, description="Probability that a solved task is issued anyway.")


class CurriculumSolved(ScoreCurriculum[SolvedOptions]):
    """Issues no more of what is solved, but for a look now and then whether it still is."""

    options_type = SolvedOptions

    def should_issue(self, task: Task) -> bool:
        score = self.score(task)
        if score is None or not self._is_solved(score):
            return True
        return self.chance(task, score, self.options.recheck)

    def _is_solved(self, score: Score) -> bool:
        return score.average >= self.options.threshold and score.groups >= self.options.min_groups

    def metrics(self) -> Mapping[str, float]:
        solved = sum(self._is_solved(score) for score in self._scores.values())
        return {**super().metrics(), "solved": float(solved)}


class DifficultyOptions(ScoreOptions):
    """Which scores are wanted."""

    target: float = Field(default=0.5, description="The score of the tasks that are wanted most.")
    width: float = Field(default=0.25, gt=0, description="How far from it interest falls to exp(-1/2).")
    floor: float = Field(default=0.05, gt=0, le=1, description="Every task is issued with at least this probability.")


class DifficultyTarget(ScoreCurriculum[DifficultyOptions]):
    """Prefers tasks whose score is near a target.

    A task of score s is issued with probability max(floor, exp(-((s - target) / width)^2 / 2)).
    """

    options_type = DifficultyOptions

    def should_issue(self, task: Task) -> bool:
        score = self.score(task)
        return score is None or self.chance(task, score, self.probability(score.average))

    def probability(self, score: float) -> float:
        """Of issuing a task of this score."""
        distance = (score - self.options.target) / self.options.width
        return max(self.options.floor, math.exp(-0.5 * distance * distance))


Kind = Literal["easy", "hard"]


class GresoOptions(OperatorOptions):
    """The paper's values are the defaults; the floor is ours."""

    p_easy: float = Field(default=0.5, ge=0, le=1, description="First base probability for tasks that always succeed.")
    p_hard: float = Field(default=0.5, ge=0, le=1, description="First base probability for tasks that always fail.")
    target_easy: float = Field(
        default=1 / 12, ge=0, le=1, description="Wanted share of groups whose rewards are equal and high."
    )
    target_hard: float = Field(
        default=1 / 6, ge=0, le=1, description="Wanted share of groups whose rewards are equal and low."
    )
    step: float = Field(default=0.01, ge=0, le=1, description="How far the probabilities move with each version.")
    floor: float = Field(default=0.02, ge=0, le=1, description="Every task is issued with at least this probability.")
    easy_from: float = Field(default=0.5, description="Equal reported rewards from this on are easy, others hard.")


class Greso(Operator[GresoOptions]):
    """Skips tasks in proportion to how often in a row their groups taught nothing.

    GRESO, arXiv:2506.02177: a task whose last z groups all had equal rewards is issued with probability
    p^z, p being that of easy or of hard tasks. With every version p moves by ``step``: down where the
    share of such groups since the last version was at or above its target, else up.
    """

    options_type = GresoOptions

    def __init__(self, options: GresoOptions, context: OperatorContext) -> None:
        super().__init__(options, context)
        check_compares(context)
        self.p: dict[str, float] = {"easy": options.p_easy, "hard": options.p_hard}
        self._seen = {"easy": 0, "hard": 0, "all": 0}
        """Groups since the last version."""
        self._streaks: dict[str, tuple[int, Kind, int]] = {}
        """By task: equal groups in a row, their kind, and how often the task was asked for since."""

    def observe(self, group: GroupView) -> None:
        if len(group.episodes) < 2:
            return
        self._seen["all"] += 1
        key = task_key(group.task)
        members = [agent.samples for episode in group.episodes for agent in episode.agents]
        if not self.context.variance.is_equal(members):
            self._streaks.pop(key, None)
            return
        kind: Kind = "easy" if group.mean_reported >= self.options.easy_from else "hard"
        self._seen[kind] += 1
        z, _, asked = self._streaks.get(key, (0, kind, 0))
        self._streaks[key] = (z + 1, kind, asked)

    def should_issue(self, task: Task) -> bool:
        key = task_key(task)
        if key not in self._streaks:
            return True
        z, kind, asked = self._streaks[key]
        self._streaks[key] = (z, kind, asked + 1)
        return self.context.random(key, z, asked).random() < self.probability(z, kind)

    def probability(self, z: int, kind: Kind) -> float:
        """Of issuing a task after ``z`` equal groups in a row."""
        return max(self.options.floor, self.p[kind] ** z)

    def on_version(self, version: int) -> None:
        if self._seen["all"]:
            for kind, target in (("easy", self.options.target_easy), ("hard", self.options.target_hard)):
                share = self._seen[kind] / self._seen["all"]
                moved = self.p[kind] + (-self.options.step if share >= target else self.options.step)
                self.p[kind] = min(1.0, max(0.0, moved))
        self._seen = {"easy": 0, "hard": 0, "all": 0}

    def state_dict(self) -> Mapping[str, Any]:
        return {"p": self.p, "seen": self._seen, "streaks": self._streaks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.p, self._seen = dict(state["p"]), dict(state["seen"])
        self._streaks = {key: (z, kind, asked) for key, (z, kind, asked) in state["streaks"].items()}

    def metrics(self) -> Mapping[str, float]:
        return {"p_easy": self.p["easy"], "p_hard": self.p["hard"], "streaks": float(len(self._streaks))}
