"""Admission bound by staleness: generate only what can still be trained in time.

Without such a bound, surplus episodes are generated and then dropped for age, and it is the long
ones that get dropped.  The obvious pair of rules (at most ``(max_staleness + 1) * groups_per_step``
groups in the system; never step past ``lowest floor + max_staleness``) is not enough.  With
``max_staleness`` 2 and one group per step, admit a, b, c at version 0; train a, then train a newer
group d while b and c still run.  Now b trains at version 2, in time, and c at version 3, too late:
the trainer either waits for ever or loses c.  What matters is not only the oldest group but *how many*
groups of which age share the remaining steps.  That is a deadline-scheduling question with an exact answer.

Legend: ``S`` = max_staleness, ``G`` = groups_per_step, ``v`` = version at which the next batch trains,
``f_0 <= f_1 <= ...`` = floor versions of all training groups in the system (in flight or buffered).

**Feasible.**  ``feasible(v)`` iff ``v + i // G <= f_i + S`` for every ``i``: training the groups oldest
floor first, ``G`` per step, trains each at a version within ``S`` of its floor.  For unit jobs,
earliest-deadline-first meets all deadlines if any order does (Jackson 1955), so this is the weakest
condition under which nothing must be lost.

**Rules.**  (A) admit a group with floor ``f`` iff the system with it is feasible at ``v``.
(B) take the ``G`` buffered groups with the lowest floors as the batch iff what remains is feasible at ``v + 1``.

**Bound.**  Where steps obey B (``straggler = "wait"`` without a time limit), the system is feasible at all
times: the empty one is; A and B check it; a group that is lost or filtered out only lowers the index of
others.  So a batch trained at ``v`` holds floors ``f >= v - S``, every sampled version is at least its group's
floor (floors are the lowest version served at admission, and engines never go back), and staleness is at
most ``S``.

**No deadlock.**  Suppose every group in flight ends some day (finishes, or is lost and dropped), and
engines receive published versions.  If at least ``G`` groups remain when all have ended, the batch is
the ``G`` lowest of the whole system and the group at index ``i >= G`` moves to ``i - G``:
``v + 1 + (i - G) // G = v + i // G <= f_i + S``, so B allows the step.  If fewer remain, a new group
with floor ``v`` comes last, at an index ``i < G``, where ``v + 0 <= v + S``: A allows it.  Several
policies have a gate each and a group must pass all of its policies' gates; each of them opens by
itself by this argument.

**Capacity.**  With floors equal to ``v``, A admits exactly ``(S + 1) * G`` groups.  While a step runs,
``v`` is already one higher than the served version, so ``S * G`` groups may be in the system besides
the batch in training; with ``S = 0`` that is none, which is synchronous training.

docs/staleness.md tells this at length, with what the other rules for stragglers do instead of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessGate:
    """The two rules for one policy; stateless, see the module for the proof."""

    max_staleness: int
    groups_per_step: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.groups_per_step < 1:
            raise ValueError(
                f"expected max_staleness >= 0 and groups_per_step >= 1, "
                f"got {self.max_staleness} and {self.groups_per_step}"
            )

    @property
    def capacity(self) -> int:
        """Groups in the system at most: in flight, buffered and in training."""
        return (self.max_staleness + 1) * self.groups_per_step

    def is_feasible(self, version: int, floors: Iterable[int]) -> bool:
        """Whether all groups can train in time if the next batch trains at ``version``."""
        return all(
            version + index // self.groups_per_step <= floor + self.max_staleness
            for index, floor in enumerate(sorted(floors))
        )

    def may_admit(self, floors: Sequence[int], *, version: int, floor: int) -> bool:
        """Rule A: whether one more group may start.

        Args:
            floors: Floor versions of the training groups in flight and buffered, in any order.
            version: The version at which the next batch trains: that of the trainer, plus one while
                a step is under way.
            floor: The lowest version that an engine serves now.

        A system that is infeasible already (steps did not wait for a straggler; a restart with a smaller
        ``max_staleness``) admits by the same rule once the fewest groups that must be late are set aside:
        waiting for what cannot be saved would only let the trainer starve.
        """
        return self.is_feasible(version, [*self.in_time(version, floors), floor])

    def in_time(self, version: int, floors: Iterable[int]) -> list[int]:
        """As many of ``floors`` as can all train in time, ascending; all of them where the system is feasible.

        Oldest first, a group that cannot have a place in time leaves it to the next: for unit jobs no choice
        keeps more (Moore 1968).
        """
        kept: list[int] = []
        for floor in sorted(floors):
            if version + len(kept) // self.groups_per_step <= floor + self.max_staleness:
                kept.append(floor)
        return kept

    def may_step(self, version: int, *, in_flight: Sequence[int], buffered: Sequence[int]) -> bool:
        """Rule B: whether the ``groups_per_step`` lowest of ``buffered`` may be trained at ``version``.

        Where waiting could not help (the batch is the oldest of the whole system, yet the rest is
        infeasible: only possible if feasibility was lost by a restart with a smaller ``max_staleness``),
        the step is allowed, and the buffer drops what gets too old.  Groups in flight that are too
        old already are not waited for.
        """
        ordered = sorted(buffered)
        batch, rest = ordered[: self.groups_per_step], ordered[self.groups_per_step :]
        if len(batch) < self.groups_per_step:
            return False
        waited_for = [f for f in in_flight if version <= f + self.max_staleness]
        if self.is_feasible(version + 1, [*rest, *waited_for]):
            return True
        return not any(floor < batch[-1] for floor in waited_for)
