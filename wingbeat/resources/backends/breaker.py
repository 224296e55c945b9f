"""A circuit breaker: an address that keeps failing is left alone for a while, then tried with one request.

::

    CLOSED ──too many failures in a row──▶ OPEN ──after a while──▶ HALF_OPEN ──success──▶ CLOSED
       ▲ └── success, failure (counted)      ▲                       │
       └───────────────────────────────────  └───────failure─────────┘

Without it every request to a dead address costs its time-out, and an address that is coming back is met by all that
waited for it at once (Nygard, "Release It!", 2007, chapter 5).  Pure: the caller asks, and says what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from wingbeat.core.ports import Clock


class BreakerState(Enum):
    """What may be sent."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half_open"
    """One request, whose end decides."""


class BreakerEvent(Enum):
    """What happened."""

    SUCCESS = "success"
    FAILURE = "failure"
    """One more, within what is tolerated."""
    TOO_MANY = "too_many"
    """The failure with which it is too many in a row."""
    COOLED = "cooled"
    """It was left alone long enough."""


TRANSITIONS: Mapping[tuple[BreakerState, BreakerEvent], BreakerState] = MappingProxyType(
    {
        (BreakerState.CLOSED, BreakerEvent.SUCCESS): BreakerState.CLOSED,
        (BreakerState.CLOSED, BreakerEvent.FAILURE): BreakerState.CLOSED,
        (BreakerState.CLOSED, BreakerEvent.TOO_MANY): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.COOLED): BreakerState.HALF_OPEN,
        # requests that were sent before it opened may end later; they say nothing of how it is now
        (BreakerState.OPEN, BreakerEvent.SUCCESS): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.FAILURE): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.TOO_MANY): BreakerState.OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.SUCCESS): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.FAILURE): BreakerState.OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.TOO_MANY): BreakerState.OPEN,
    }
)


def advance(now: BreakerState, event: BreakerEvent) -> BreakerState:
    """The next state.  Raises AssertionError for an event that cannot be in it: a bug of the caller."""
    assert (now, event) in TRANSITIONS, f"a breaker that is {now.value} cannot see {event.value}"
    return TRANSITIONS[now, event]


class Breaker:
    """Of one address."""

    __slots__ = (
        "_clock",
        "_cool_s",
        "_first_cool_s",
        "_max_cool_s",
        "_max_failures",
        "_opened_at",
        "_probing",
        "num_failures",
        "state",
    )

    def __init__(self, *, max_failures: int, cool_s: float, clock: Clock, max_cool_s: float | None = None) -> None:
        """``max_failures`` in a row open it for ``cool_s``, and each probe that fails for twice as long, up to
        ``max_cool_s``."""
        self._max_failures = max_failures
        self._first_cool_s = self._cool_s = cool_s
        self._max_cool_s = cool_s if max_cool_s is None else max_cool_s
        self._clock = clock
        self.num_failures = 0
        """In a row; those that came while it was open do not count."""
        self._opened_at = 0.0
        self._probing = False
        self.state = BreakerState.CLOSED

    @property
    def opens_at(self) -> float:
        """When a request may be tried again, on the clock; 0 while nothing keeps one back but another request."""
        return self._opened_at + self._cool_s if self.state is BreakerState.OPEN else 0.0

    def may_send(self) -> bool:
        """Whether :meth:`sent` may follow."""
        if self.state is BreakerState.OPEN and self._clock() >= self.opens_at:
            self.state = advance(self.state, BreakerEvent.COOLED)
            self._probing = False
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and not self._probing)

    def sent(self) -> bool:
        """A request is on its way; whether it is the one that decides.  Hand that to how it ended."""
        if self.state is BreakerState.HALF_OPEN:
            self._probing = True
            return True
        return False

    def succeeded(self, *, is_probe: bool) -> None:
        """The address answered."""
        self._end(BreakerEvent.SUCCESS, is_probe=is_probe)

    def failed(self, *, is_probe: bool) -> None:
        """It did not, or with a fault of its own."""
        if self.state is BreakerState.CLOSED or is_probe:
            self.num_failures += 1
        too_many = self.num_failures >= self._max_failures
        self._end(BreakerEvent.TOO_MANY if too_many else BreakerEvent.FAILURE, is_probe=is_probe)

    def abandoned(self, *, is_probe: bool) -> None:
        """Nobody waited for the answer: another request may decide."""
        if is_probe:
            self._probing = False

    def _end(self, event: BreakerEvent, *, is_probe: bool) -> None:
        if self.state is BreakerState.HALF_OPEN and not is_probe:
            return  # one from before: only the probe decides
        before, self.state = self.state, advance(self.state, event)
        self._probing = self._probing and not is_probe
        if self.state is BreakerState.OPEN and before is not BreakerState.OPEN:
            self._opened_at = self._clock()
            is_again = before is BreakerState.HALF_OPEN
            self._cool_s = min(2 * self._cool_s, self._max_cool_s) if is_again else self._first_cool_s
        if self.state is BreakerState.CLOSED and event is BreakerEvent.SUCCESS:
            self.num_failures = 0
