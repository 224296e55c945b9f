"""A broadcast that wakes whoever waits for a state to change."""

from __future__ import annotations

import asyncio


class Changed:
    """Wakes everybody who waits for the state to change; never polls.

    Each notice has an event of its own, which stays set: to clear one takes it from who is about to wait.  Of one loop.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """How often it was notified."""

    def notify(self) -> None:
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True when notified, False when ``timeout_s`` passed first."""
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation
                await event.wait()
        except TimeoutError:
            return False
        return True
