"""Closing what nobody has used for too long."""

from __future__ import annotations

import asyncio
import math

from wingbeat.core.ports import Clock
from wingbeat.resources.admission import Admission
from wingbeat.resources.turns import Turns


class IdleSweep:
    """One timer, for whatever is due first."""

    def __init__(self, admission: Admission, turns: Turns, clock: Clock) -> None:
        self._admission = admission
        self._turns = turns
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf

    def expect(self, at: float) -> None:
        """Something unused is to be closed at ``at``, unless it is used before."""
        if at < self._at:
            self.close()
            self._at = at
            delay_s = max(0.0, at - self._clock()) + 1e-3  # a moment later, so that it is certainly due
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def close(self) -> None:
        """No more timers; of those of an event loop that is gone, too."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at = None, math.inf

    def _sweep(self) -> None:
        self._timer, self._at = None, math.inf
        now = self._clock()
        for slot in list(self._admission.idle):
            ttl_s = slot.book.spec.idle_ttl_s
            if ttl_s is not None:
                if slot.idle_since + ttl_s <= now:
                    self._admission.evict(slot)
                else:
                    self.expect(slot.idle_since + ttl_s)
        self._turns.look(())
