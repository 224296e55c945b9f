"""Training on groups again while they are young enough."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from wingbeat.dataflow.operators.base import Operator, OperatorContext, OperatorOptions
from wingbeat.dataflow.operators.views import BatchView


class ReplayOptions(OperatorOptions):
    """How much is repeated."""

    ratio: float = Field(default=0.25, gt=0, le=1, description="At most so many episodes more, per episode of a batch.")
    max_uses: int = Field(default=1, ge=1, description="How often a group is trained again at most.")
    max_staleness: int | None = Field(
        default=None,
        ge=1,
        description="Versions that a repeated token may be behind; unset: those of `dataflow.max_staleness`.",
    )


class Replay(Operator[ReplayOptions]):
    """Adds groups of earlier batches to a batch, as whole groups, so that they keep their baselines.

    Those used least come first, then the newest.
    """

    options_type = ReplayOptions

    def __init__(self, options: ReplayOptions, context: OperatorContext) -> None:
        super().__init__(options, context)
        bound = context.max_staleness
        if bound == 0:
            raise ValueError("what was trained is at least one version old: set dataflow.max_staleness to 1 or more")
        if options.max_staleness is not None and options.max_staleness > bound:
            raise ValueError(
                f"`max_staleness` is {options.max_staleness}, above dataflow.max_staleness, {bound}, which binds all"
            )
        if options.ratio * context.groups_per_step < 1:
            raise ValueError(
                f"`ratio` {options.ratio:g} of {context.groups_per_step} groups (dataflow.groups_per_step) is less than"
                f" one group, so nothing would be repeated: set it to {1 / context.groups_per_step:g} or more"
            )
        self._max_staleness = bound if options.max_staleness is None else options.max_staleness

    def compose(self, batch: BatchView) -> Iterable[str]:
        room = int(self.options.ratio * len(batch.episodes) + 1e-9)
        chosen: list[str] = []
        for group in sorted(batch.past, key=lambda past: (past.uses, -past.step, past.id)):
            if group.uses >= self.options.max_uses or group.staleness > self._max_staleness:
                continue
            if len(group.episodes) <= room:
                chosen.append(group.id)
                room -= len(group.episodes)
        return chosen
