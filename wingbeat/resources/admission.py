"""Who goes next: a pure state machine over the events of a pool, without clocks, tasks or instances.

The rule, the same for single leases and for several at once: *a ticket is let in when it is first in line at every
pot it takes from, and each pot holds enough*.  All its parts are taken together or none is.

It follows that there is no deadlock among tickets (the oldest of all is first in all of its lines, and holds
nothing while it waits), that none starves however large it is, and that a large one which waits delays only those
that want some of the same pots.  An event looks at the heads of the lines it touched and at no one else, so giving
back one instance wakes one ticket, with however many in line.

Idle instances hold their share of the budgets.  Where the first in line lacks something that idle instances hold,
as many as it takes are told to go, those unused for longest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from wingbeat.resources.pots import AmountPot, CostPot, DrawPot, Pot, RatePot, TicketState
from wingbeat.resources.states import ResourceState

_LEASED = ResourceState.LEASED


class Book:
    """What all tickets and instances of one spec have in common."""

    __slots__ = ("alone", "holds", "idle", "is_shared", "key", "num_live", "num_waiting", "pots", "shared", "spec")

    def __init__(
        self, key: Hashable, spec: Any, *, holds: Sequence[tuple[AmountPot, int]], is_shared: bool = False
    ) -> None:
        self.key = key
        self.spec = spec
        self.holds = tuple(holds)
        """What one instance takes for as long as it lives; its spec's own limit is among them."""
        self.pots: tuple[Pot, ...] = tuple(pot for pot, _ in holds)
        self.is_shared = is_shared
        self.idle: list[Slot] = []
        """The one used last at the end: what is too many ages in front."""
        self.shared: Slot | None = None
        """The one that serves all."""
        self.num_live = 0
        self.num_waiting = 0
        self.alone: tuple[tuple[Book, int], ...] = ((self, 1),)
        """The counts of a ticket for one."""


class Slot:
    """One instance, from the decision to start it until it is gone."""

    __slots__ = ("book", "idle_since", "is_going", "num_users", "state", "tenant")

    def __init__(self, book: Book) -> None:
        self.book = book
        self.state = ResourceState.STARTING
        self.num_users = 0
        self.idle_since = 0.0
        self.is_going = False
        """Told to go, its share counted as returning."""
        self.tenant: Any = None
        """What the driver knows of it."""

    def move(self, to: ResourceState) -> None:
        """Raises AssertionError for a step that the table lacks: a bug of the pool."""
        state = self.state
        assert to in state.targets, f"a {state.value} resource cannot become {to.value}"
        self.state = to


class Ticket:
    """One who asks: for instances of some books, for draws, or for both."""

    __slots__ = ("asked_at", "counts", "draws", "pots", "slots", "state")

    def __init__(self, counts: Sequence[tuple[Book, int]], draws: Sequence[tuple[DrawPot, float]] = ()) -> None:
        self.counts = counts
        self.draws = draws
        if not draws and len(counts) == 1:
            self.pots = counts[0][0].pots
        else:
            touched = [pot for book, _ in counts for pot in book.pots] + [pot for pot, _ in draws]
            self.pots = tuple(dict.fromkeys(touched))
        self.state = TicketState.WAITING
        self.asked_at = 0.0
        self.slots: Sequence[Slot] = ()
        """Once let in: in the order of ``counts``, each book's together."""


class Admission:
    """The books of one pool.  Every event returns the tickets that it let in, oldest first per line."""

    def __init__(self, *, max_idle: int | None = None) -> None:
        self._max_idle = max_idle
        self._idle: OrderedDict[Slot, None] = OrderedDict()
        """Of all books, unused for longest first."""
        self.books: dict[Hashable, Book] = {}
        self.evicted: list[Slot] = []
        """Told to go since the driver last looked; it empties the list."""
        self.rate_pots: list[RatePot] = []
        """Those whose time brings something back."""
        self.cost_pots: list[CostPot] = []

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> Iterable[Slot]:
        """Unused for longest first."""
        return self._idle

    # --- events

    def ask(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Let in at once, or lined up."""
        ticket.asked_at = now
        for pot in ticket.pots:
            if pot.line and pot.first is not None:
                break
        else:
            if self._try(ticket, now):
                ticket.state = TicketState.LET_IN
                return [ticket]
        for pot in ticket.pots:
            pot.line.append(ticket)
        for book, count in ticket.counts:
            book.num_waiting += count
        return []

    def withdraw(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Whoever waited does so no longer."""
        ticket.state = TicketState.WITHDRAWN
        for pot in ticket.pots:
            pot.leave()
        for book, count in ticket.counts:
            book.num_waiting -= count
            self.forget(book)
        return self.look(ticket.pots, now)

    def rest(self, slot: Slot, now: float) -> list[Ticket]:
        """An instance is ready and nobody's."""
        book = slot.book
        slot.idle_since = now
        if not book.is_shared:
            book.idle.append(slot)
        self._idle[slot] = None
        let_in = self.look(book.pots, now)
        if self._max_idle is not None:
            while len(self._idle) > self._max_idle:
                self.evict(next(iter(self._idle)))
        return let_in

    def gone(self, slot: Slot, now: float) -> list[Ticket]:
        """An instance is no more: what it held is free."""
        book = slot.book
        if book.shared is slot:
            book.shared = None
        for pot, amount in book.holds:
            pot.free += amount
            if slot.is_going:
                pot.returning -= amount
        book.num_live -= 1
        self.forget(book)
        return self.look(book.pots, now)

    def look(self, pots: Iterable[Pot], now: float) -> list[Ticket]:
        """Something changed at these pots (a rate's time has come, say)."""
        let_in: list[Ticket] = []
        pending = list(pots)
        while pending:
            ticket = pending.pop().first
            if ticket is None:
                continue
            if len(ticket.pots) > 1 and not self._is_first(ticket):
                continue
            if not self._try(ticket, now):
                continue
            ticket.state = TicketState.LET_IN
            for pot in ticket.pots:
                pot.line.popleft()
            for book, count in ticket.counts:
                book.num_waiting -= count
            let_in.append(ticket)
            pending += ticket.pots
        return let_in

    # --- what the driver decides

    def evict(self, slot: Slot) -> None:
        """Tell an idle instance to go."""
        self._take_idle(slot)
        self.detach(slot)
        slot.move(ResourceState.CLOSED)
        self.evicted.append(slot)

    def detach(self, slot: Slot) -> None:
        """It takes no further users and will be gone."""
        if slot.book.shared is slot:
            slot.book.shared = None
        if not slot.is_going:
            slot.is_going = True
            for pot, amount in slot.book.holds:
                pot.returning += amount

    def replace(self, slot: Slot) -> Slot:
        """Another in the place of one that is gone: it takes over its share and its users."""
        book = slot.book
        fresh = Slot(book)
        fresh.num_users, slot.num_users = slot.num_users, 0
        if slot.is_going:
            slot.is_going = False
            for pot, amount in book.holds:
                pot.returning -= amount
        if book.is_shared and book.shared in (None, slot):
            book.shared = fresh
        return fresh

    # --- decisions

    @staticmethod
    def _is_first(ticket: Ticket) -> bool:
        return all(pot.first is ticket for pot in ticket.pots)

    def _try(self, ticket: Ticket, now: float) -> bool:
        """Take all that a ticket asks for, or nothing."""
        if len(ticket.counts) == 1 and not ticket.draws:  # by far the most frequent cases
            book, count = ticket.counts[0]
            if count == 1 and book.idle:
                slot = book.idle.pop()
                del self._idle[slot]
                slot.move(_LEASED)
                slot.num_users = 1
                ticket.slots = (slot,)
                return True
            if not self._idle and not book.is_shared:
                for pot, amount in book.holds:
                    if pot.free < amount:
                        return False
        if not self._has_room(ticket) or not all(pot.has(amount, now) for pot, amount in ticket.draws):
            return False
        for pot, amount in ticket.draws:
            pot.take(amount, now)
        ticket.slots = tuple(
            self._join(book) if book.is_shared else self._take(book)
            for book, count in ticket.counts
            for _ in range(count)
        )
        return True

    def _has_room(self, ticket: Ticket) -> bool:
        """Whether what must be started fits; if not, idle instances of others are told to go."""
        lacking: dict[AmountPot, int] = {}
        for book, count in ticket.counts:
            num_new = (book.shared is None) if book.is_shared else count - len(book.idle)
            if num_new > 0:
                for pot, amount in book.holds:
                    lacking[pot] = lacking.get(pot, -pot.free) + amount * num_new
        short = {pot: amount for pot, amount in lacking.items() if amount > 0}
        if short:
            self._make_room(ticket, {pot: amount - pot.returning for pot, amount in short.items()})
        return not short

    def _make_room(self, ticket: Ticket, short: dict[AmountPot, int]) -> None:
        kept = dict(ticket.counts)
        going: list[Slot] = []
        num_idle = {book: len(book.idle) if not book.is_shared else 1 for book in kept}
        for slot in self._idle:
            if all(amount <= 0 for amount in short.values()):
                break
            book = slot.book
            if book in kept and num_idle[book] <= kept[book]:
                continue  # the ticket itself takes it
            if any(short.get(pot, 0) > 0 for pot, _ in book.holds):
                going.append(slot)
                if book in kept:
                    num_idle[book] -= 1
                for pot, amount in book.holds:
                    if pot in short:
                        short[pot] -= amount
        for slot in going:
            self.evict(slot)

    def _take(self, book: Book) -> Slot:
        if book.idle:
            slot = book.idle.pop()
            del self._idle[slot]
            slot.move(_LEASED)
        else:
            slot = self._new(book)
        slot.num_users = 1
        return slot

    def _join(self, book: Book) -> Slot:
        slot = book.shared
        if slot is None:
            slot = book.shared = self._new(book)
        elif slot in self._idle:
            del self._idle[slot]
            slot.move(_LEASED)
        slot.num_users += 1
        return slot

    def _new(self, book: Book) -> Slot:
        for pot, amount in book.holds:
            pot.free -= amount
        book.num_live += 1
        return Slot(book)

    def _take_idle(self, slot: Slot) -> None:
        del self._idle[slot]
        if not slot.book.is_shared:
            slot.book.idle.remove(slot)

    def forget(self, book: Book) -> None:
        """A book that nothing is in and nobody waits for."""
        if book.num_live == 0 and book.num_waiting == 0 and self.books.get(book.key) is book:
            del self.books[book.key]
