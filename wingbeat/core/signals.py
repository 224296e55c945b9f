"""A broadcast that wakes whoever waits for a state to change."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Changed:
    """Wakes everybody who waits for the state to change; never polls.  Of one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """How often it was notified."""

    def notify(self) -> None:
        """Each notice has an event of its own, which stays set: to clear one takes it from who is about to wait."""
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    def wait(self, timeout_s: float | None = None) -> Coroutine[Any, Any, bool]:
        """True when notified after this call, however late it is awaited (a task of its own begins later); False when
        ``timeout_s`` passed first."""
        return _wait(self._event, timeout_s)


async def _wait(event: asyncio.Event, timeout_s: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation
            await event.wait()
    except TimeoutError:
        return False
    return True
