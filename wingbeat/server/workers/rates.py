"""How fast engines are, and which one a generation goes to.

The rate of an engine is the tokens per second of one generation there, as control sees it: prompt, queue, network
and all.  A generation goes to the engine with the least expected wait, ``(generations there + 1) / rate``.  So

- engines of equal rates are given equal numbers, as where nothing is measured;
- engines of unequal rates run numbers in proportion to their rates, once there is more than they need one each for;
- one that holds its generations longer than it did is given no more meanwhile, as it holds them;
- while all are full, too, one that is far slower than the fastest holds few (:func:`room_shares`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

HALF_LIFE_S = 60.0
"""After so long an observation counts half: one that was slow for a while is tried again."""
PRIOR_S = 1.0
"""Seconds of generation for which the engines' median stands in: all that is known of one that just joined."""
FORGOTTEN_S = 1e-6
"""Of what is left of an observation: less weighs nothing beside the prior, and would end as no number."""


class RateMeter:
    """Tokens over seconds of the generations of one engine, the younger the heavier."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at_s = 0.0

    def record(self, num_tokens: int, seconds: float, *, now_s: float) -> None:
        """A generation ended that took ``seconds`` for ``num_tokens``."""
        self._fade(now_s)
        self._tokens += num_tokens
        self._seconds += max(seconds, FORGOTTEN_S)

    @property
    def measured(self) -> float | None:
        """Tokens per second; None before anything ended."""
        return self._tokens / self._seconds if self._tokens else None

    def rate(self, *, median: float, now_s: float) -> float:
        """What to expect: the measured rate, and the ``median`` of all engines the longer nothing was measured."""
        self._fade(now_s)
        return (self._tokens + median * PRIOR_S) / (self._seconds + PRIOR_S)

    def _fade(self, now_s: float) -> None:
        fade = 0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S)
        self._tokens *= fade
        self._seconds *= fade
        self._at_s = now_s
        if self._seconds < FORGOTTEN_S:
            self._tokens = self._seconds = 0.0


def rates(meters: Sequence[RateMeter], *, now_s: float) -> list[float]:
    """The rate of each engine; 1 where none has measured anything."""
    found = [measured for meter in meters if (measured := meter.measured) is not None]
    median = statistics.median(found) if found else 1.0
    return [meter.rate(median=median, now_s=now_s) for meter in meters]


def room_shares(rates: Sequence[float]) -> list[float]:
    """How much of its room each engine is given: all of it, unless it is less than half as fast as the fastest.

    A full pool would fill any engine that has room; groups then wait for those of their members that are on the
    slowest.
    """
    fastest = max(rates, default=1.0)
    return [min(1.0, 2 * rate / fastest) for rate in rates]


def least_wait(num_running: Sequence[int], rates: Sequence[float], able: Sequence[bool]) -> int | None:
    """The index of the able engine that would end one more generation first, the first of equals; None without one."""
    waits = [
        ((running + 1) / rate, index)
        for index, (running, rate, is_able) in enumerate(zip(num_running, rates, able, strict=True))
        if is_able
    ]
    return min(waits)[1] if waits else None
