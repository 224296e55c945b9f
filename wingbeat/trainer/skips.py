"""When a step may go by without moving the weights.

One gradient that is not finite says little: an overflow in bfloat16, a sample that nothing can be made of.  Its update
is skipped, and the step counts, so that a replay of the logged batches comes to the same weights.  Several in a row say
that the policy has diverged: then the step fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from wingbeat.trainer.optimizer import NonFiniteGradient

logger = logging.getLogger(__name__)


class SkipRule:
    """Allows ``limit`` steps in a row to skip an update."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._skips = False

    @property
    def in_a_row(self) -> int:
        """Steps up to the last one that skipped an update."""
        return self._in_a_row

    def restore(self, in_a_row: int) -> None:
        """Go on from where a checkpoint was made."""
        self._in_a_row, self._skips = in_a_row, False

    def unless_not_finite(self, step: Callable[[], float]) -> float | None:
        """The norm that an optimiser's ``step`` gives; None where it was not finite and nothing moved.

        Raises NonFiniteGradient where as many steps in a row as may be skipped have been.
        """
        try:
            return step()
        except NonFiniteGradient as error:
            if self._in_a_row >= self._limit:
                raise
            self._skips = True
            logger.warning("update skipped, of at most %d steps in a row: %s", self._limit, error)
            return None

    def end_step(self) -> None:
        """After the last update of a step."""
        self._in_a_row = self._in_a_row + 1 if self._skips else 0
        self._skips = False
