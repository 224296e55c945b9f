"""Ending what dead processes left: sandboxes, containers, pods whose owner was killed."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from wingbeat.core.errors import WingbeatError
from wingbeat.core.ports import Clock
from wingbeat.resources.backend import Backends, late_s_of
from wingbeat.resources.backends import default_backends
from wingbeat.resources.guard import guarded
from wingbeat.resources.ledger import Entry, LeftLedger, left_in, state_folder

logger = logging.getLogger("wingbeat.resources")

REAP_TIMEOUT_S = 60.0
"""For one thing."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """What became of what dead owners left on this machine."""

    ended: tuple[Entry, ...] = ()
    """(kind, handle) of what was still there."""
    gone: tuple[Entry, ...] = ()
    """What had ended by itself."""
    left: tuple[Entry, ...] = ()
    """What could not be ended; the next reaper tries again."""
    again_s: float | None = None
    """In so many seconds something has to be looked for once more, since it may not have been there yet."""


async def reap(folder: Path | None = None, *, backends: Backends | None = None) -> Reaped:
    """End what owners that are dead have left; things of living ones are never touched.

    Every new pool does so by itself.  ``folder`` is where the ledgers are (None: this user's own).

    A container whose owner was killed as it asked for it may be made after we looked, for a daemon or a cluster takes
    its time.  So what was not there is looked for again, ``late_s`` of its back-end after the first look that found
    its owner dead: this takes two minutes where owners of containers or pods were killed, and no time elsewhere.
    """
    seen = await look(folder, backends=backends)
    while seen.again_s is not None:
        await asyncio.sleep(seen.again_s)
        again = await look(folder, backends=backends)
        gone = tuple(entry for entry in again.gone if entry not in seen.ended)
        seen = Reaped(seen.ended + again.ended, seen.gone + gone, again.left, again.again_s)
    return seen


async def look(folder: Path | None = None, *, backends: Backends | None = None, clock: Clock = time.time) -> Reaped:
    """End what is there now.  Where ``again_s`` says so, another look must follow, by this process or a later one:
    the first one is noted in the ledger."""
    visit = _Visit(default_backends() if backends is None else backends, clock)
    for ledger in left_in(state_folder() if folder is None else folder):
        try:
            for entry in ledger.entries:
                await visit.see_to(ledger, entry)
        finally:
            ledger.close()
    if visit.ended:
        logger.warning(
            "ended %d resources that processes which are gone had left: %s", len(visit.ended), _names(visit.ended)
        )
    return Reaped(tuple(visit.ended), tuple(visit.gone), tuple(visit.left), visit.again_s)


class _Visit:
    """One look at everything."""

    def __init__(self, backends: Backends, clock: Clock) -> None:
        self._backends = backends
        self._clock = clock
        self.ended: list[Entry] = []
        self.gone: list[Entry] = []
        self.left: list[Entry] = []
        self.again_s: float | None = None

    async def see_to(self, ledger: LeftLedger, entry: Entry) -> None:
        kind, handle = entry
        now = self._clock()
        try:
            backend = self._backends[kind]
            was_there = await guarded(backend.reap(handle), timeout_s=REAP_TIMEOUT_S, doing=f"ending {kind} {handle!r}")
        except (WingbeatError, KeyError) as error:
            logger.warning("%s %r was left by a process that is gone, and cannot be ended: %s", kind, handle, error)
            self.left.append(entry)
            return
        if was_there:
            self.ended.append(entry)
        due_s = self._due_s(ledger, entry, now, late_s_of(backend))
        if due_s > 0:
            self.again_s = max(due_s, self.again_s or 0.0)
            return
        if not was_there:
            self.gone.append(entry)
        ledger.ended(entry)

    @staticmethod
    def _due_s(ledger: LeftLedger, entry: Entry, now: float, late_s: float) -> float:
        """Until it can no longer appear.  The first look notes when it was: its owner was dead by then."""
        if not late_s:
            return 0.0
        first = ledger.looked_at.get(entry)
        if first is None or first > now:  # or the clock was set back
            ledger.looked(entry, now)
            first = now
        return first + late_s - now


def _names(entries: list[Entry]) -> str:
    return ", ".join(f"{kind} {handle:.40}" for kind, handle in entries[:8]) + (", ..." if len(entries) > 8 else "")
