"""Training episodes in which no trainable policy took a turn: they are kept, and train nothing.

They hold no samples, so no baseline counts them; whoever runs them must hear why nothing is learnt.
The same holds, told once, for a policy that is rewarded in an episode in which it took no turn.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

logger = logging.getLogger(__name__)

IN_A_ROW = 4
"""So many are no accident."""


class Untrained:
    """The newest run of such episodes, as they finish."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._called: set[str] = set()
        self._trainable: tuple[str, ...] = ()
        self._told: set[str] = set()

    def note(self, called: Collection[str], trainable: Sequence[str]) -> str:
        """Count a finished training episode; returns what its caller should know, or "".

        ``called`` are the policies that took turns, ``trainable`` those of the episode that train.
        """
        if not trainable or any(policy in called for policy in trainable):
            self.in_a_row = 0
            self._called.clear()
            return ""
        self.in_a_row += 1
        self._called.update(called)
        self._trainable = tuple(trainable)
        if self.in_a_row == IN_A_ROW:
            logger.warning(self.blocker)
        what = f"called no trainable policy, only {_listed(called)}" if called else "made no model call"
        return (
            f"this training episode {what}: its reward trains nothing and counts in no baseline;"
            f" the model that trains is {_listed(trainable)}"
        )

    def note_uncalled(self, policies: Sequence[str]) -> str:
        """``policies`` were rewarded and took no turn; what the caller should know, once for each, or ""."""
        fresh = [policy for policy in policies if policy not in self._told]
        self._told.update(fresh)
        if not fresh:
            return ""
        return (
            f"{_listed(fresh)} took no turn in this episode: what `rewards.policies` says of it is recorded, and"
            " trains nothing (told once)"
        )

    @property
    def blocker(self) -> str:
        """What to tell once it is no accident, else ""."""
        if self.in_a_row < IN_A_ROW:
            return ""
        what = f"they called {_listed(self._called)}" if self._called else "they made no model call"
        return (
            f"the last {self.in_a_row} episodes called no trainable policy; {what}:"
            f" nothing to learn from; the model that trains is {_listed(self._trainable)} (`episode.model`)"
        )


def _listed(policies: Collection[str]) -> str:
    ordered = policies if isinstance(policies, Sequence) else sorted(policies)
    return ", ".join(repr(policy) for policy in ordered)
