"""How much of training runs beside generation."""

from __future__ import annotations

from collections.abc import Callable


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
