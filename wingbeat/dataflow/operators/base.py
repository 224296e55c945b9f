"""What an operator is, and what it gets to see.

An operator stands between closed groups and training batches.  It sees whole groups through read-only
views and answers with decisions::

    class Brevity(Operator[BrevityOptions]):
        options_type = BrevityOptions

        def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
            if episode.num_sampled > self.options.max_tokens:
                return episode.drop("too long")
            return episode.shape(-0.001 * episode.num_sampled)

It never hands episodes on itself, so it cannot lose, repeat or invent one: the chain applies the decisions
and refuses any that does not fit the group.  Override only what is needed; everything else does nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from wingbeat.core.config.section import Section
from wingbeat.core.errors import WingbeatError
from wingbeat.core.types import Task
from wingbeat.dataflow.operators.variance import VarianceRule
from wingbeat.dataflow.operators.views import BatchView, Decision, EpisodeView, GroupView


class OperatorFault(WingbeatError):
    """An operator raised, or answered with what does not fit the group."""


class OperatorOptions(Section):
    """Base of an operator's options: the keys beside ``use`` in its table, checked when the run starts."""


OptionsT = TypeVar("OptionsT", bound=OperatorOptions)


@dataclass(frozen=True)
class OperatorContext:
    """What an operator is told about the run, before anything happens."""

    label: str
    """The operator's name in metrics and messages."""
    policy: str
    seed: int
    group_size: int
    groups_per_step: int
    max_staleness: int
    variance: VarianceRule = field(default_factory=VarianceRule)
    """What equal rewards are under the policy's credit."""

    def random(self, *content: object) -> random.Random:
        """A generator that depends on the run's seed, this operator and ``content`` only.

        Pass what the decision is about (a task's id, how often it was asked), so that the same
        decision comes out the same, whenever and in whatever order it is taken.
        """
        text = "\x1f".join(map(str, (self.seed, self.policy, self.label, *content)))
        return random.Random(hashlib.sha256(text.encode()).digest())


class Operator(Generic[OptionsT]):
    """Base of all operators, built-in ones and yours; each method does nothing unless overridden.

    One instance serves one policy.  Whatever a method raises ends this operator, not the run
    (``on_error``); the group it was looking at goes on as it came.

    Order for a closed group: :meth:`observe` of all operators, then for each operator in turn
    :meth:`on_episode` for every episode and :meth:`on_group` with those that are left.
    """

    options_type: type[OperatorOptions] = OperatorOptions
    """Set it to the class of your options."""

    def __init__(self, options: OptionsT, context: OperatorContext) -> None:
        """Raise ValueError where the options do not fit the run; the run then does not start."""
        self.options = options
        self.context = context

    def should_issue(self, task: Task) -> bool:
        """Whether a new group may start on this task (curricula).

        Asked once for each task that is dealt.  After many refusals in a row a task is issued
        anyway.
        """
        return True

    def observe(self, group: GroupView) -> None:
        """Take note of a group as it closed, before any operator acted on it (statistics, curricula)."""

    def on_episode(self, episode: EpisodeView, group: GroupView) -> Decision | None:
        """What to do with one episode; None leaves it as it is."""
        return None

    def on_group(self, group: GroupView) -> Iterable[Decision]:
        """What to do with the group's episodes: at most one decision for each; none leaves them as they are."""
        return ()

    def on_version(self, version: int) -> None:
        """The policy has reached this version (once for each, in order)."""

    def compose(self, batch: BatchView) -> Iterable[str]:
        """Ids of past groups to train again with this batch."""
        return ()

    def state_dict(self) -> Mapping[str, Any]:
        """All that must outlive a restart, as JSON data.  Saved with every group that closes."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers for people, reported with every step as ``operator/LABEL/NAME``."""
        return {}


def task_key(task: Task) -> str:
    """Names a task in an operator's state."""
    return f"{task.source}/{task.id}"
