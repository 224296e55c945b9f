"""Waiting for one's turn: the asyncio side of :mod:`wingbeat.resources.admission`.

Who waits has a future of its own, so that cancelling one never disturbs another who waits for the same thing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from wingbeat.core.errors import WingbeatError
from wingbeat.core.ports import Clock
from wingbeat.resources.admission import Admission, Book, Slot, Ticket
from wingbeat.resources.pots import CostPot, DrawPot, Pot, RatePot, TicketState
from wingbeat.resources.specs import ResourceFailed, ResourceWait

Waits = dict["asyncio.Future[None]", tuple[float, "Request"]]
"""Who waits for what, and until when."""


class Request(Ticket):
    """A ticket and those who wait for it."""

    __slots__ = ("fault", "futures", "holdings", "waits", "what")

    def __init__(
        self, counts: Sequence[tuple[Book, int]], draws: Sequence[tuple[DrawPot, float]] = (), *, what: str = ""
    ) -> None:
        Ticket.__init__(self, counts, draws)
        self.fault: WingbeatError | None = None
        self.futures: tuple[asyncio.Future[None], ...] = ()
        self.holdings: Sequence[Any] = ()
        """What the pool hands out for it."""
        self.waits: Waits | None = None
        """Where its futures are listed with their ends."""
        self.what = what

    def wake(self) -> None:
        """Everyone who waits for it looks again."""
        futures, self.futures = self.futures, ()
        waits = self.waits
        for future in futures:
            if waits is not None:
                waits.pop(future, None)
            if not future.done():
                future.set_result(None)


class Turns:
    """Lets requests in, in turn; tells the pool what was let in and what must go."""

    def __init__(
        self,
        admission: Admission,
        clock: Clock,
        *,
        on_let_in: Callable[[Request], None] | None = None,
        on_evicted: Callable[[Slot], None] | None = None,
    ) -> None:
        self.admission = admission
        self.clock = clock
        self._on_let_in = on_let_in
        self._on_evicted = on_evicted
        self._timer: asyncio.TimerHandle | None = None
        self._told: list[Ticket] = []
        """Let in, and not yet told of."""
        self._is_telling = False
        self._deadlines = _Deadlines(clock)

    def ask(self, request: Request) -> None:
        """Raises ResourceFailed where money is spent: no waiting brings it back."""
        for pot, amount in request.draws:
            if isinstance(pot, CostPot) and not pot.has(amount, 0.0):
                raise _spent(pot, amount)
        let_in = self.admission.ask(request, self.clock())
        if let_in or self.admission.evicted or self.admission.rate_pots:
            self._deliver(let_in)

    def withdraw(self, request: Request) -> None:
        if request.state is TicketState.WAITING:
            self._deliver(self.admission.withdraw(request, self.clock()))
            request.wake()

    def rest(self, slot: Slot, now: float) -> None:
        let_in = self.admission.rest(slot, now)
        if let_in or self.admission.evicted:
            self._deliver(let_in)

    def gone(self, slot: Slot) -> None:
        self._deliver(self.admission.gone(slot, self.clock()))

    def look(self, pots: Sequence[Pot]) -> None:
        self._deliver(self.admission.look(pots, self.clock()))

    def _deliver(self, let_in: Sequence[Ticket]) -> None:
        """Tell of what was let in and evicted; what that brings about in turn is told after it, not within it."""
        self._told += let_in
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._told or self.admission.evicted:
                while self._told:
                    request: Any = self._told.pop(0)
                    if self._on_let_in is not None:
                        self._on_let_in(request)
                    if request.futures:
                        request.wake()
                if self.admission.evicted:
                    self._tell_evicted()
        finally:
            self._is_telling = False
        if self.admission.cost_pots:
            self._refuse_spent()
        if self.admission.rate_pots:
            self._arm()

    def _refuse_spent(self) -> None:
        """Whoever is first in line for money that was spent meanwhile waits no longer, nor do those behind."""
        refused, let_in = list[Request](), list[Ticket]()
        for pot in self.admission.cost_pots:
            first: Any = pot.first
            while first is not None and not pot.has(amount := dict(first.draws)[pot], 0.0):
                first.fault = _spent(pot, amount)
                refused.append(first)
                let_in += self.admission.withdraw(first, self.clock())
                first = pot.first
        for request in refused:
            request.wake()
        if let_in:
            self._deliver(let_in)

    def _tell_evicted(self) -> None:
        evicted, self.admission.evicted = self.admission.evicted, []
        for slot in evicted:
            assert self._on_evicted is not None
            self._on_evicted(slot)

    def _arm(self) -> None:
        """Look again once a rate has come back as far as the first in its line needs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now, times = self.clock(), list[float]()
        for rate in self.admission.rate_pots:
            first = rate.first
            if first is not None:
                times += [rate.ready_at(amount, now) for pot, amount in first.draws if pot is rate]
        if times:
            # a moment later than that: a clock that is asked too early would have it ask again and again
            delay_s = max(0.0, min(times) - now) + 1e-3
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._rates_came_back)

    def _rates_came_back(self) -> None:
        self._timer = None
        self._deliver(self.admission.look(self.admission.rate_pots, self.clock()))

    def change_of(self, request: Request, wait_s: float | None) -> asyncio.Future[None]:
        """Done when something about a request changes.

        Fails with ResourceWait if it still waits for its turn after ``wait_s``.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request.futures += (future,)
        if wait_s is not None and request.state is TicketState.WAITING:
            self._deadlines.add(wait_s, self.clock() + wait_s, future, request)
        return future

    async def draw(self, request: Request, *, wait_s: float | None) -> None:
        """Ask for what has only draws, and wait for it; whoever is cancelled has drawn nothing."""
        self.ask(request)
        try:
            while request.state is not TicketState.LET_IN:
                if request.fault is not None:
                    raise request.fault
                await self.change_of(request, wait_s)
        except BaseException:
            if request.state is TicketState.LET_IN:
                for pot, amount in request.draws:
                    pot.take(-amount, self.clock())
                self.look([pot for pot, _ in request.draws])
            self.withdraw(request)
            raise

    def close(self) -> None:
        """No more timers."""
        self._deadlines.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Deadlines:
    """When those who wait have waited for too long.

    One timer for all, and lists of those who wait equally long, each in the order of its ends: a timer of the loop
    for each of a thousand who wait would cost more than their turns.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[float, Waits] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf

    def add(self, wait_s: float, until: float, future: asyncio.Future[None], request: Request) -> None:
        waits = self._waits.get(wait_s)
        if waits is None:
            waits = self._waits[wait_s] = {}
        waits[future] = (until, request)
        request.waits = waits
        if until < self._at:
            self._arm(until)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._at = at
        if at < math.inf:
            delay_s = max(0.0, at - self._clock()) + 1e-3  # a moment later, so that it is certainly due
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now, earliest = self._clock(), math.inf
        for wait_s, waits in tuple(self._waits.items()):
            for future, (until, request) in tuple(waits.items()):
                if until > now and not future.done():
                    earliest = min(earliest, until)
                    break
                del waits[future]
                if not future.done() and request.state is TicketState.WAITING:
                    waited_s = now - request.asked_at
                    future.set_exception(ResourceWait(f"{_title(request)}: {_why(request)} for {waited_s:.3g} s"))
            if not waits:
                del self._waits[wait_s]
        self._arm(earliest)

    def close(self) -> None:
        self._waits.clear()
        self._arm(math.inf)


def _spent(pot: CostPot, amount: float) -> ResourceFailed:
    return ResourceFailed(f"{pot.name}: {pot.spent:g} of {pot.capacity:g} are spent, so {amount:g} more cannot be had")


def _title(request: Request) -> str:
    return request.what or ", ".join(book.spec.title for book, _ in request.counts)


def _why(request: Request) -> str:
    """Where a ticket stands in line, for people."""
    for pot in request.pots:
        first = pot.first
        if first is not request:
            return f"was not first in line for {pot.name}"
    for pot, _ in request.draws:
        if isinstance(pot, RatePot):
            return f"was first in line, but {pot.name} did not come back far enough"
    names = ", ".join(pot.name for pot in request.pots)
    return f"was first in line for {names}, but too much of it stayed in use"
