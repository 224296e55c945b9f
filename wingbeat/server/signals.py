"""Small pieces of control's event loop: a broadcast that wakes waiters, and the overlap meter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changed:
    """Wakes everybody who waits for the state to change; never polls."""

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


class OverlapMeter:
    """Measures for how much of the training time generation ran too.

    ``fraction`` = seconds with a step *and* a generation in progress / seconds with a step in progress.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._training = 0
        self._generating = 0
        self.train_s = 0.0
        self.both_s = 0.0

    def _settle(self) -> None:
        now = self._clock()
        if self._training:
            self.train_s += now - self._since
            if self._generating:
                self.both_s += now - self._since
        self._since = now

    def training(self, change: int) -> None:
        self._settle()
        self._training += change

    def generating(self, in_flight: int) -> None:
        if bool(in_flight) != bool(self._generating):
            self._settle()
        self._generating = in_flight

    @property
    def fraction(self) -> float:
        self._settle()
        return self.both_s / self.train_s if self.train_s else 0.0
