"""The ledger's last good copy, made again and again while the run goes on; what is found damaged is told at once."""

from __future__ import annotations

import asyncio
import logging

from wingbeat.core.errors import LedgerCorrupt, UnavailableError
from wingbeat.core.events import EventLog
from wingbeat.dataflow.ledger import Ledger

logger = logging.getLogger(__name__)

SWEEP_S = 600.0
"""Between looks at the turns that ended attempts left, where no copies are made."""
MAX_SHARE = 0.05
"""Of all time that may go into copying: the copies of a large ledger are made less often."""


class LedgerWatch:
    """Runs beside control; the work itself is in a thread."""

    def __init__(self, ledger: Ledger, *, every_s: float, events: EventLog) -> None:
        """``every_s`` 0: no copies."""
        self._ledger = ledger
        self._every_s = every_s
        self._events = events
        self._stopped = False
        self._problem = ""

    @property
    def warnings(self) -> list[str]:
        """What people should know, in plain words."""
        return [self._problem] if self._problem else []

    async def run(self) -> None:
        """Until cancelled."""
        check = self._ledger.check
        if check.why:
            self._events.emit(
                "ledger_checked",
                why=check.why,
                whole=check.is_whole,
                num_bytes=check.num_bytes,
                seconds=round(check.seconds, 3),
            )
        every_s = self._every_s or SWEEP_S
        wait_s = every_s
        try:
            while True:
                await asyncio.sleep(wait_s)
                await asyncio.to_thread(self._ledger.sweep_captures)
                wait_s = max(every_s, await self.back_up() / MAX_SHARE if self._every_s else 0.0)
        finally:
            self._stopped = True

    async def back_up(self) -> float:
        """Make a copy now; how many seconds it took.  Damage and a full disk are told, and end nothing."""
        try:
            made = await asyncio.to_thread(self._ledger.back_up, stop=lambda: self._stopped)
        except LedgerCorrupt as error:
            self._tell("ledger_corrupt", error.message)
            return 0.0
        except UnavailableError as error:
            self._tell("backup_failed", error.message)
            return 0.0
        if made is None:
            return 0.0
        self._problem = ""
        self._events.emit("ledger_backup", num_bytes=made.num_bytes, seconds=round(made.seconds, 3))
        return made.seconds

    def _tell(self, event: str, text: str) -> None:
        if text != self._problem:
            logger.error("%s", text)
            self._events.emit(event, text=text)
        self._problem = text
