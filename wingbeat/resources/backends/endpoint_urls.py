"""Which of several addresses a request goes to, and when.

To the one with the fewest requests in flight, among those whose breaker lets it pass, that have not asked to be left
alone (429) and that have room (``max_concurrent``).  Where there is none, requests wait in the order in which they
came.  One that can only be served after its time is over is refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from wingbeat.core.ports import Clock
from wingbeat.resources.backends.breaker import Breaker
from wingbeat.resources.specs import ResourceFailed

LEAST_TIMER_S = 0.001


class Target:
    """One address."""

    __slots__ = ("breaker", "in_flight", "not_before", "url")

    def __init__(self, url: str, breaker: Breaker) -> None:
        self.url = url
        self.breaker = breaker
        self.in_flight = 0
        self.not_before = 0.0
        """It asked to be left alone until then, on the clock."""

    @property
    def usable_at(self) -> float:
        """From when on nothing but other requests keeps one back."""
        return max(self.not_before, self.breaker.opens_at)


class Passage:
    """The right to send one request to a target; ended exactly once, by one of its methods."""

    __slots__ = ("_choice", "_ended", "_is_probe", "target")

    def __init__(self, target: Target, choice: Choice) -> None:
        self.target = target
        self._choice = choice
        self._ended = False
        self._is_probe = target.breaker.sent()
        target.in_flight += 1

    def succeeded(self) -> None:
        """It was answered, whatever the answer."""
        self.target.breaker.succeeded(is_probe=self._is_probe)
        self._end()

    def throttled(self, retry_after_s: float) -> None:
        """It is there, and asks to be left alone for so long."""
        self.target.not_before = max(self.target.not_before, self._choice.clock() + retry_after_s)
        self.succeeded()

    def failed(self) -> None:
        """It was not answered, or with a fault of the address."""
        self.target.breaker.failed(is_probe=self._is_probe)
        self._end()

    def abandon(self) -> None:
        """Nobody waits for the answer any more; harmless once it has ended."""
        if not self._ended:
            self.target.breaker.abandoned(is_probe=self._is_probe)
            self._end()

    def _end(self) -> None:
        assert not self._ended, "a passage ends once"
        self._ended = True
        self.target.in_flight -= 1
        self._choice.serve()


class Choice:
    """The addresses of one pool; of one event loop."""

    def __init__(self, targets: Sequence[Target], *, max_concurrent: int | None, clock: Clock) -> None:
        self.clock = clock
        self.targets = tuple(targets)
        self._max_concurrent = max_concurrent
        self._line: deque[tuple[asyncio.Future[Passage], float]] = deque()
        """Who waits, and until when it would take a passage."""
        self._timer: asyncio.TimerHandle | None = None
        self._turn = 0
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    async def enter(self, *, give_up_at: float) -> Passage:
        """The next passage, in order.

        Raises ResourceFailed if no address may be tried before ``give_up_at`` (on the clock) or the pool is closed.
        """
        self._refuse(give_up_at)
        if not self._line and (target := self._best()) is not None:
            return Passage(target, self)
        waiter: asyncio.Future[Passage] = asyncio.get_running_loop().create_future()
        self._line.append((waiter, give_up_at))
        self.serve()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().abandon()  # it came in the very moment
            raise

    def serve(self) -> None:
        """Give passages to those who wait, as far as there are some."""
        while self._line:
            waiter, give_up_at = self._line[0]
            if waiter.done():
                self._line.popleft()
                continue
            fault = self._fault(give_up_at)
            target = None if fault is not None else self._best()
            if fault is None and target is None:
                break
            self._line.popleft()
            if fault is not None:
                waiter.set_exception(fault)
            elif target is not None:
                waiter.set_result(Passage(target, self))
        self._set_timer()

    def close(self) -> None:
        """Whoever waits gets ResourceFailed."""
        self._closed = True
        self.serve()

    def _refuse(self, give_up_at: float) -> None:
        fault = self._fault(give_up_at)
        if fault is not None:
            raise fault

    def _fault(self, give_up_at: float) -> ResourceFailed | None:
        if self._closed:
            return ResourceFailed("the endpoint is closed; lease it again")
        soonest = min(target.usable_at for target in self.targets)
        if soonest <= max(give_up_at, self.clock()):
            return None
        states = ", ".join(f"{target.url} ({target.breaker.state.value})" for target in self.targets)
        return ResourceFailed(
            f"no address may be tried for the next {soonest - self.clock():.1f} s: {states}; after failures in a row an"
            " address is left alone for breaker_s, after 429 for as long as it said"
        )

    def _best(self) -> Target | None:
        """The least busy of those that take a request now; of equals the next in turn."""
        now, count = self.clock(), len(self.targets)
        best: Target | None = None
        for step in range(count):
            target = self.targets[(self._turn + step) % count]
            has_room = self._max_concurrent is None or target.in_flight < self._max_concurrent
            if has_room and target.not_before <= now and target.breaker.may_send():
                best = target if best is None or target.in_flight < best.in_flight else best
        if best is not None:
            self._turn = (self.targets.index(best) + 1) % count
        return best

    def _set_timer(self) -> None:
        """Come back when the next address is usable again, where only time can bring that."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits = [target.usable_at - self.clock() for target in self.targets]
        coming = [wait for wait in waits if wait > 0]
        if self._line and coming and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(max(LEAST_TIMER_S, min(coming)), self.serve)
