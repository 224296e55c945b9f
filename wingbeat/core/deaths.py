"""How often what is kept running may die: processes of agents, of a server and on a cluster alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from wingbeat.core.ports import Clock

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Pauses after the first death within :data:`DEATHS_WINDOW_S`, the second, and so on."""
MAX_DEATHS = len(BACKOFF_S) + 1
DEATHS_WINDOW_S = 120.0
MAX_SLOW_DEATHS = 20
SLOW_WINDOW_S = 3600.0
"""What takes minutes to begin and then dies (a model that does not fit, say) never dies often within two of them."""


class Deaths:
    """Of what is kept running: how long to wait before it begins again, and when that is of no use any more.

    One rule for all places: six deaths within two minutes are too many, and so are twenty within an hour, without those
    by a signal: somebody who kills a process now and then finds it there again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=MAX_DEATHS)
        self._own_times: deque[float] = deque(maxlen=MAX_SLOW_DEATHS)

    def count(self, *, by_signal: bool = False) -> None:
        """It died now."""
        now = self._clock()
        self._times.append(now)
        if not by_signal:
            self._own_times.append(now)

    @property
    def are_too_many(self) -> bool:
        return self._recent >= MAX_DEATHS or _within(self._own_times, SLOW_WINDOW_S) >= MAX_SLOW_DEATHS

    @property
    def pause_s(self) -> float:
        """After the last one, which were not too many; one that comes after a long life is the first again."""
        return BACKOFF_S[self._recent - 1]

    def words(self) -> str:
        """How often it died, for people, where that is too often."""
        if self._recent >= MAX_DEATHS:
            return f"{self._recent} times within {DEATHS_WINDOW_S:.0f} s"
        return f"{len(self._own_times)} times within {SLOW_WINDOW_S / 60:.0f} minutes"

    @property
    def _recent(self) -> int:
        return _within(self._times, DEATHS_WINDOW_S)


def _within(times: Sequence[float], window_s: float) -> int:
    """How many of them are at most so much older than the last one."""
    return sum(times[-1] - time_s < window_s for time_s in times)
