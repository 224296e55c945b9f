"""Ending what dead processes left: sandboxes, containers, pods whose owner was killed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from wingbeat.core.errors import WingbeatError
from wingbeat.resources.backend import Backends
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


async def reap(folder: Path | None = None, *, backends: Backends | None = None) -> Reaped:
    """End what owners that are dead have left; things of living ones are never touched.

    Every new pool does so by itself.  ``folder`` is where the ledgers are (None: this user's own).
    """
    known = default_backends() if backends is None else backends
    ended: list[Entry] = []
    gone: list[Entry] = []
    left: list[Entry] = []
    for ledger in left_in(state_folder() if folder is None else folder):
        try:
            for entry in ledger.entries:
                await _reap_one(ledger, entry, known, ended, gone, left)
        finally:
            ledger.close()
    if ended:
        logger.warning("ended %d resources that processes which are gone had left: %s", len(ended), _names(ended))
    return Reaped(tuple(ended), tuple(gone), tuple(left))


async def _reap_one(
    ledger: LeftLedger, entry: Entry, backends: Backends, ended: list[Entry], gone: list[Entry], left: list[Entry]
) -> None:
    kind, handle = entry
    try:
        backend = backends[kind]
        was_there = await guarded(backend.reap(handle), timeout_s=REAP_TIMEOUT_S, doing=f"ending {kind} {handle!r}")
    except (WingbeatError, KeyError) as error:
        logger.warning("%s %r was left by a process that is gone, and cannot be ended: %s", kind, handle, error)
        left.append(entry)
        return
    (ended if was_there else gone).append(entry)
    ledger.ended(entry)


def _names(entries: list[Entry]) -> str:
    return ", ".join(f"{kind} {handle:.40}" for kind, handle in entries[:8]) + (", ..." if len(entries) > 8 else "")
