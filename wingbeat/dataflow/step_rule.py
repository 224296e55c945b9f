"""When a policy takes its next step although older groups still run: ``dataflow.straggler``.

Admission (:mod:`wingbeat.dataflow.staleness`, rule A) is the same in every mode.  The modes differ in
rule B and in what happens to tokens that are over-age once a batch is taken (:mod:`wingbeat.dataflow.aging`):

==================  ==================================================  ============================
straggler           a full batch is held back                           over-age tokens
==================  ==================================================  ============================
wait, "unlimited"   while training it would make an older group late    do not occur (docs/staleness.md)
wait, seconds       the same, for so long at most                       lose their part in training
mask                never                                               lose their part in training
drop                never                                               go with their whole episode
==================  ==================================================  ============================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from wingbeat.core.config.dataflow import DataflowConfig
from wingbeat.dataflow.staleness import StalenessGate

Straggler = Literal["wait", "mask", "drop"]
UNLIMITED_S = math.inf


@dataclass(frozen=True, slots=True)
class StepRule:
    """The rule of one policy; holds no state: who waits keeps the time."""

    gate: StalenessGate
    straggler: Straggler = "wait"
    straggler_wait_s: float = 60.0
    """Seconds; ``UNLIMITED_S`` for no limit.  Of ``wait`` only."""

    @classmethod
    def of(cls, config: DataflowConfig) -> StepRule:
        """The rule that a run is configured with."""
        limit = config.straggler_wait_s
        return cls(
            StalenessGate(config.max_staleness, config.groups_per_step),
            straggler=config.straggler,
            straggler_wait_s=UNLIMITED_S if limit == "unlimited" else limit,
        )

    def waits(self, version: int, *, in_flight: Sequence[int], buffered: Sequence[int]) -> bool:
        """Whether a full batch is held back for an older running group: the time to count as waiting.

        Args:
            version: The version at which the batch would train.
            in_flight: Floor versions of the running training groups, in any order.
            buffered: Floor versions of the groups in the buffer, in any order.
        """
        if self.straggler != "wait" or len(buffered) < self.gate.groups_per_step:
            return False
        return not self.gate.may_step(version, in_flight=in_flight, buffered=buffered)

    def may_step(self, version: int, *, in_flight: Sequence[int], buffered: Sequence[int], waited_s: float) -> bool:
        """Whether the ``groups_per_step`` lowest of ``buffered`` may be trained at ``version`` now.

        ``waited_s`` says for how long :meth:`waits` has been true without a break.
        """
        if len(buffered) < self.gate.groups_per_step:
            return False
        return waited_s >= self.straggler_wait_s or not self.waits(version, in_flight=in_flight, buffered=buffered)
