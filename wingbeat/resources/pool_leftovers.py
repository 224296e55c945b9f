"""What could not be ended, or may yet appear: looked for again while the pool lives.

A request to another machine (make a container, say) that broke off may still be carried out after its maker gave up
on it.  And an instance that could not be closed today, since its daemon was away, can be tomorrow.  All of these stay
in the ledger until somebody has seen to them: this pool, or once its process is gone the next one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from wingbeat.core.errors import WingbeatError
from wingbeat.core.ports import Clock
from wingbeat.resources.backend import Backend
from wingbeat.resources.guard import guarded
from wingbeat.resources.ledger import Ledger
from wingbeat.resources.pool_tenants import Works

logger = logging.getLogger("wingbeat.resources")

RETRY_S, MAX_RETRY_S = 60.0, 600.0
"""After the first attempt in vain, and at most."""
LOOK_TIMEOUT_S = 60.0
"""For one."""


@dataclass(slots=True)
class _Left:
    backend: Backend
    handle: str
    due: float
    retry_s: float


class Leftovers:
    """One timer, for whatever is due first."""

    def __init__(self, works: Works, ledger: Ledger, clock: Clock) -> None:
        self._works = works
        self._ledger = ledger
        self._clock = clock
        self._left: list[_Left] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_looking = False
        self.looking: asyncio.Task[None] | None = None
        """The last look; a pool that closes does not wait for it, since the next one goes on with it."""
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._left)

    def expect(self, backend: Backend, handle: str, *, after_s: float | None = None) -> None:
        """To be ended by its name ``after_s`` from now; None: it was tried just now, and is tried again."""
        due = self._clock() + (RETRY_S if after_s is None else after_s)
        self._left.append(_Left(backend, handle, due, 2 * RETRY_S if after_s is None else RETRY_S))
        self.arm()

    def arm(self) -> None:
        """Also after the pool went on in another event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._left and not self._is_looking and not self._is_closed:
            delay_s = max(0.0, min(left.due for left in self._left) - self._clock()) + 1e-3
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._begin)

    def close(self) -> None:
        """No more timers; the ledger keeps what is left."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._timer = None
        self._is_looking = True
        self.looking = self._works.spawn(self._look(), "leftovers")

    async def _look(self) -> None:
        """At those that are due.  Where one cannot be ended, others of its kind are not tried now: its daemon is
        away, and each would take its time to say so."""
        now, away = self._clock(), set[str]()
        try:
            for left in [left for left in self._left if left.due <= now]:
                if self._is_closed:
                    return
                if left.backend.kind in away or not await self._end(left):
                    away.add(left.backend.kind)
                    left.due = self._clock() + left.retry_s
                    left.retry_s = min(2 * left.retry_s, MAX_RETRY_S)
                else:
                    self._left.remove(left)
        finally:
            self._is_looking = False
            self.arm()

    async def _end(self, left: _Left) -> bool:
        kind, handle = left.backend.kind, left.handle
        try:
            doing = f"ending {kind} {handle!r}"
            was_there = await guarded(left.backend.reap(handle), timeout_s=LOOK_TIMEOUT_S, doing=doing)
        except WingbeatError as error:
            logger.warning("%s %r is still left, and tried again: %s", kind, handle, error.message)
            return False
        if was_there:
            logger.warning("ended %s %r, which had been left", kind, handle)
        self._ledger.ended(kind, handle)
        return True
