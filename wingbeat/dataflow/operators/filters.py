"""Built-in filters: what leaves a group, or a group as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, model_validator

from wingbeat.core.types import Task
from wingbeat.dataflow.operators.base import Operator, OperatorContext, OperatorOptions, task_key
from wingbeat.dataflow.operators.views import Decision, EpisodeView, GroupView


class FailureOptions(OperatorOptions):
    """Which episodes failed."""

    truncated: bool = Field(default=True, description="Those in which a turn ran out of tokens.")
    metrics: list[str] = Field(default=[], description="Those whose client reported one of these metrics above 0.")
    min_reward: float | None = Field(default=None, description="Those with a reported reward below this.")

    @model_validator(mode="after")
    def _says_something(self) -> FailureOptions:
        if not self.truncated and not self.metrics and self.min_reward is None:
            raise ValueError("`truncated` is false and neither `metrics` nor `min_reward` is set: nothing would fail")
        return self


class FailureFilter(Operator[FailureOptions]):
    """Drops episodes that failed, though their agent ran to its end.

    Episodes that broke for another reason (outcomes other than ``agent``) never reach an operator.
    """

    options_type = FailureOptions

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        if self.options.truncated and episode.truncated:
            return episode.drop("truncated")
        failed = next((name for name in self.options.metrics if episode.metrics.get(name, 0.0) > 0), None)
        if failed is not None:
            return episode.drop(f"metric {failed}")
        low = self.options.min_reward
        if low is not None and any(agent.reported < low for agent in episode.agents):
            return episode.drop("low reward")
        return None


class LengthOptions(OperatorOptions):
    """Bounds that are kept; unset ones do not bind."""

    min_tokens: int | None = Field(default=None, ge=0, description="Fewest sampled tokens of an episode.")
    max_tokens: int | None = Field(default=None, ge=0, description="Most sampled tokens of an episode.")
    min_turns: int | None = Field(default=None, ge=0, description="Fewest turns of the policy in an episode.")
    max_turns: int | None = Field(default=None, ge=0, description="Most turns of the policy in an episode.")

    @model_validator(mode="after")
    def _bounds_something(self) -> LengthOptions:
        _check_bounds("tokens", self.min_tokens, self.max_tokens)
        _check_bounds("turns", self.min_turns, self.max_turns)
        if {self.min_tokens, self.max_tokens, self.min_turns, self.max_turns} == {None}:
            raise ValueError("set at least one of `min_tokens`, `max_tokens`, `min_turns`, `max_turns`")
        return self


class LengthFilter(Operator[LengthOptions]):
    """Drops episodes that are too short or too long."""

    options_type = LengthOptions

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        options = self.options
        for what, value, low, high in (
            ("tokens", episode.num_sampled, options.min_tokens, options.max_tokens),
            ("turns", episode.num_turns, options.min_turns, options.max_turns),
        ):
            if low is not None and value < low:
                return episode.drop(f"too few {what}")
            if high is not None and value > high:
                return episode.drop(f"too many {what}")
        return None


class RewardBounds(OperatorOptions):
    """Bounds of a reward, as shaped so far; unset ones do not bind."""

    min: float | None = Field(default=None, description="The lowest reward.")
    max: float | None = Field(default=None, description="The highest reward.")

    @model_validator(mode="after")
    def _bounds_something(self) -> RewardBounds:
        _check_bounds("reward", self.min, self.max)
        if self.min is None and self.max is None:
            raise ValueError("set `min`, `max` or both")
        return self


class RewardFilter(Operator[RewardBounds]):
    """Drops episodes in which an agent's reward lies outside."""

    options_type = RewardBounds

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        rewards = [agent.reward for agent in episode.agents]
        if self.options.min is not None and min(rewards) < self.options.min:
            return episode.drop("reward too low")
        if self.options.max is not None and max(rewards) > self.options.max:
            return episode.drop("reward too high")
        return None


class ZeroVarianceFilter(Operator[OperatorOptions]):
    """Drops groups whose rewards, as shaped so far, are all equal; another group is sampled in place.

    With credit per turn the rewards of turns count, too.  Groups that were asked for with one
    member pass: their reward itself is the signal.
    """

    def __init__(self, options: OperatorOptions, context: OperatorContext) -> None:
        super().__init__(options, context)
        check_compares(context)

    def on_group(self, group: GroupView) -> Iterable[Decision]:
        members = [agent.samples for episode in group.episodes for agent in episode.agents]
        if group.size == 1 or not self.context.variance.is_equal(members):
            return ()
        return [episode.drop("equal rewards") for episode in group.episodes]


class SuccessRateOptions(OperatorOptions):
    """Which groups are neither too easy nor too hard."""

    success: float = Field(default=1.0, description="A reported reward from which an episode is a success.")
    above: float = Field(default=0.0, ge=0, lt=1, description="The share of successes must be above this.")
    below: float = Field(default=1.0, gt=0, le=1, description="The share of successes must be below this.")

    @model_validator(mode="after")
    def _leaves_room(self) -> SuccessRateOptions:
        if self.above >= self.below:
            raise ValueError(f"`above` must be less than `below`, got {self.above:g} and {self.below:g}")
        return self


class DynamicSampling(Operator[SuccessRateOptions]):
    """Drops groups that always or never succeed, and samples on until the batch is full.

    DAPO, arXiv:2503.14476, eq. 11: 0 < number of correct answers < group size.  Groups that were
    asked for with one member pass.
    """

    options_type = SuccessRateOptions

    def __init__(self, options: SuccessRateOptions, context: OperatorContext) -> None:
        super().__init__(options, context)
        check_compares(context)

    def on_group(self, group: GroupView) -> Iterable[Decision]:
        if group.size == 1:
            return ()
        rate = sum(e.reported >= self.options.success for e in group.episodes) / len(group.episodes)
        if rate <= self.options.above:
            return [episode.drop("too hard") for episode in group.episodes]
        if rate >= self.options.below:
            return [episode.drop("too easy") for episode in group.episodes]
        return ()


class FloorOptions(OperatorOptions):
    """How many members a group needs."""

    members: int = Field(ge=2, description="Episodes that must be left.")


class GroupFloor(Operator[FloorOptions]):
    """Drops groups that are left with too few members for a baseline; put it after other filters.

    A group that was asked for with fewer members needs all of them.
    """

    options_type = FloorOptions

    def __init__(self, options: FloorOptions, context: OperatorContext) -> None:
        super().__init__(options, context)
        if options.members > context.group_size:
            raise ValueError(
                f"`members` is {options.members}, but groups have {context.group_size} (dataflow.group_size):"
                " every group would be dropped"
            )

    def on_group(self, group: GroupView) -> Iterable[Decision]:
        if len(group.episodes) >= min(self.options.members, group.size):
            return ()
        return [episode.drop("too few members") for episode in group.episodes]


class DeduplicateOptions(OperatorOptions):
    """What counts as a repetition."""

    tokens: bool = Field(default=True, description="Episodes of a group with the same sampled tokens: one stays.")
    task_versions: int = Field(
        default=0, ge=0, description="Groups on a task of which another was kept fewer versions ago; 0: none."
    )

    @model_validator(mode="after")
    def _says_something(self) -> DeduplicateOptions:
        if not self.tokens and not self.task_versions:
            raise ValueError("`tokens` is false and `task_versions` is 0: nothing would be a repetition")
        return self


class Deduplicate(Operator[DeduplicateOptions]):
    """Drops repetitions: equal answers within a group, or groups on a task that was trained just before.

    Such tasks are not issued, either; what is dropped is what was under way already. Where more groups in a
    row would go than can have been under way (there are too few tasks), one is kept anyway.
    """

    options_type = DeduplicateOptions

    def __init__(self, options: DeduplicateOptions, context: OperatorContext) -> None:
        super().__init__(options, context)
        self._version = 0
        self._kept: dict[str, int] = {}
        """By task: the version at which its last group was kept."""
        self._recent_in_a_row = 0
        """Groups on recent tasks that were dropped since one was kept."""
        self._most_under_way = (context.max_staleness + 1) * context.groups_per_step

    def should_issue(self, task: Task) -> bool:
        return not self._is_recent(task)

    def on_group(self, group: GroupView) -> Iterable[Decision]:
        self._version = group.version
        if self._is_recent(group.task) and self._recent_in_a_row < self._most_under_way:
            self._recent_in_a_row += 1
            return [episode.drop("recent task") for episode in group.episodes]
        self._recent_in_a_row = 0
        if self.options.task_versions:
            self._kept[task_key(group.task)] = self._version
        return self._repeated(group) if self.options.tokens else ()

    def _is_recent(self, task: Task) -> bool:
        kept = self._kept.get(task_key(task))
        return kept is not None and self._version - kept < self.options.task_versions

    def _repeated(self, group: GroupView) -> list[Decision]:
        seen: set[tuple[tuple[str, tuple[bytes, ...]], ...]] = set()
        found: list[Decision] = []
        for episode in group.episodes:
            said = tuple(sorted((agent.name, agent.sampled_tokens) for agent in episode.agents))
            if said in seen:
                found.append(episode.drop("same tokens"))
            seen.add(said)
        return found

    def on_version(self, version: int) -> None:
        self._version = version
        horizon = version - self.options.task_versions
        self._kept = {task: kept for task, kept in self._kept.items() if kept > horizon}

    def state_dict(self) -> Mapping[str, Any]:
        return {"version": self._version, "kept": self._kept, "recent_in_a_row": self._recent_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._version, self._kept = int(state["version"]), dict(state["kept"])
        self._recent_in_a_row = int(state["recent_in_a_row"])


def check_compares(context: OperatorContext) -> None:
    """Refuse operators that compare the members of a group where every group has one."""
    if context.group_size == 1:
        raise ValueError(
            "it compares the episodes of a group, and groups have one (dataflow.group_size = 1): leave it out, or set"
            " dataflow.group_size to 2 or more"
        )


def _check_bounds(what: str, low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        raise ValueError(f"the lower bound of {what} is above the upper one: {low:g} > {high:g}")
