"""When to try again: full-jitter exponential backoff inside a time budget.  Pure; the caller sleeps.

Jitter is what keeps a thousand clients from coming back to a restarted server in the same instant
(Brooker, "Exponential Backoff And Jitter", 2015).
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``budget_s`` None means forever; 0 means one try."""

    budget_s: float | None
    base_s: float = 0.1
    cap_s: float = 5.0

    def delay_s(
        self, attempt: int, *, elapsed_s: float, retry_after_s: float | None, rng: random.Random
    ) -> float | None:
        """Seconds to wait after failed try number ``attempt`` (from 0); None if the budget is spent.

        A ``Retry-After`` is a floor: up to a quarter is added to it, so that clients that were refused
        together do not come back together.
        """
        if retry_after_s is not None:
            delay = retry_after_s * (1 + 0.25 * rng.random())
        else:
            ceiling = min(self.cap_s, self.base_s * 2 ** min(attempt, 16))
            delay = ceiling * rng.random()
        if self.budget_s is not None and elapsed_s + delay > self.budget_s:
            return None
        return delay
