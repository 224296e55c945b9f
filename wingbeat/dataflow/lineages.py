"""Which steps of a policy count: versions are (lineage, step), and a rollback begins the next lineage.

A trainer that cannot be brought to where control stands (its replay fails or is switched off) continues from
an earlier step: the steps behind it are abandoned, and what they trained may be trained again::

    lineage 0   1 ── 2 ── 3 ── 4 ── 5 ── 6      abandoned: 5, 6
                                └── lineage 1   5 ── 6 ── 7      based on (0, 4)

A lineage's *ancestry* is its own steps, those of its base up to where it began, and so on to lineage 0.  What
is trained twice is judged on the ancestry of the newest lineage.  A token sampled by an abandoned version counts
as sampled by the last version that both lineages share: (0, 6) counts as 4 in lineage 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where and why a lineage began.  Lineage 0 begins with the run and has no record."""

    policy: str
    lineage: int
    base_lineage: int
    base_step: int
    """Its first step is the one after it."""
    reason: str
    began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The lineages of one policy, and which of their steps survive."""

    lineages: Mapping[int, Lineage] = field(default_factory=dict[int, Lineage])
    """All but lineage 0, by number."""

    @classmethod
    def of(cls, lineages: Iterable[Lineage]) -> Ancestry:
        return cls({lineage.lineage: lineage for lineage in lineages})

    @property
    def current(self) -> int:
        """The newest lineage, in which the next step is taken."""
        return max(self.lineages, default=0)

    def normal(self, lineage: int, step: int) -> tuple[int, int]:
        """The lineage that took a step: the base of a lineage is a step of an earlier one."""
        while lineage and step <= self._base(lineage)[1]:
            lineage = self._base(lineage)[0]
        return lineage, step

    def contains(self, lineage: int, step: int) -> bool:
        """Whether a step survives (a step of an unknown lineage does not)."""
        if lineage and lineage not in self.lineages:
            return False
        lineage, step = self.normal(lineage, step)
        return step <= self._ends().get(lineage, -1)

    def effective(self, version: int, *, lineage: int) -> int:
        """What a version of ``lineage`` counts as now: itself, or the last one that the newest lineage shares."""
        ends, highest = self._ends(), math.inf
        while lineage not in ends:
            base, step = self._base(lineage)
            highest, lineage = min(highest, step), base
        return int(min(version, highest, ends[lineage]))

    def ceiling(self, *, lineage: int) -> int | None:
        """The highest version of ``lineage`` that is not lower now; None where all are as they were."""
        highest = 2**31 - 1
        found = self.effective(highest, lineage=lineage)
        return None if found == highest else found

    def with_lineage(self, lineage: Lineage) -> Ancestry:
        return Ancestry({**self.lineages, lineage.lineage: lineage})

    def _base(self, lineage: int) -> tuple[int, int]:
        found = self.lineages.get(lineage)
        return (0, 0) if found is None else (found.base_lineage, found.base_step)

    def _ends(self) -> dict[int, float]:
        """Per surviving lineage, its last step that survives."""
        lineage = self.current
        ends: dict[int, float] = {lineage: math.inf}
        while lineage:
            base, step = self._base(lineage)
            ends[base], lineage = step, base
        return ends
