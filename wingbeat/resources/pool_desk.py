"""Places of a pool: who asks gets one in line, or the one that its owner has; who leaves gives it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from wingbeat.core.errors import ConfigError, WingbeatError
from wingbeat.resources.admission import Admission, Book
from wingbeat.resources.budgets import BudgetPots, check_together
from wingbeat.resources.pool_instances import Instances
from wingbeat.resources.pool_leases import Holding
from wingbeat.resources.pool_places import Places
from wingbeat.resources.pool_returns import Returns
from wingbeat.resources.pots import TicketState
from wingbeat.resources.specs import Reuse, Spec
from wingbeat.resources.turns import Request, Turns

logger = logging.getLogger("wingbeat.resources")


class Desk:
    """From specs to places, and back."""

    def __init__(self, admission: Admission, pots: BudgetPots, instances: Instances, returns: Returns) -> None:
        self._admission = admission
        self._pots = pots
        self._instances = instances
        self._returns = returns
        self.places = Places()
        self.turns: Turns

    # --- asking

    def held(self, spec: Spec, name: str, owner: str) -> Holding | None:
        """What an owner has already by this name, or fetched ahead; one lease more of it."""
        held = self.places.named(owner, name)
        if held is not None:
            if held.spec.key != spec.key:
                raise ConfigError(
                    f"{owner!r} holds {name!r} with another spec: end that lease first, or choose another name",
                    param="name",
                )
            held.count += 1
            return held
        for held in self.places.fetched(owner):
            if held.spec.key != spec.key:
                continue
            if held.request.fault is not None:
                logger.info("what was fetched ahead failed, so the lease tries again: %s", held.request.fault)
                self.leave(held)
                continue
            self.places.take_over(held, name)  # its place counted one lease from the beginning
            return held
        return None

    def has(self, spec: Spec, name: str, owner: str) -> bool:
        """Whether :meth:`held` has something."""
        return self.places.named(owner, name) is not None or any(
            held.spec.key == spec.key and held.request.fault is None for held in self.places.fetched(owner)
        )

    def is_there(self, spec: Spec) -> bool:
        """Whether a lease of this spec needs no start now."""
        book = self._admission.books.get(spec.key)
        return book is not None and bool(book.idle or book.shared)

    def hold_all(self, specs: Mapping[str, Spec], *, owner: str) -> dict[str, Holding]:
        """Places of several; those that are not held already are asked for together.

        What was fetched ahead is taken over where that is all that is wanted; else it goes back and is asked for with
        the rest, since to keep some while waiting for others is how a deadlock begins.
        """
        holdings: dict[str, Holding] = {}
        try:
            for name, spec in specs.items():
                held = self.held(spec, name, owner) if owner else None
                if held is not None:
                    holdings[name] = held
            fetched = [holding for holding in holdings.values() if holding.count == 1]
            is_let_in = all(holding.request.state is TicketState.LET_IN for holding in fetched)
            is_one = len({id(holding.request) for holding in fetched}) == 1
            if fetched and (len(holdings) < len(specs) or not (is_let_in or is_one)):
                for holding in fetched:
                    del holdings[holding.name]
                    self.leave(holding)
            missing = [(spec, name) for name, spec in specs.items() if name not in holdings]
            if missing:
                holdings.update({holding.name: holding for holding in self.ask(missing, owner=owner)})
        except BaseException:
            for holding in holdings.values():
                self.leave(holding)
            raise
        return holdings

    def ask(self, wanted: Sequence[tuple[Spec, str]], *, owner: str) -> list[Holding]:
        """New places in line, all of one ticket."""
        by_book: dict[Book, list[tuple[Spec, str]]] = {}
        try:
            for spec, name in wanted:
                by_book.setdefault(self._book(spec), []).append((spec, name))
            counts = [(book, len(specs)) for book, specs in by_book.items()]
            if len(wanted) > 1:
                check_together([(book.spec, book.holds, 1 if book.is_shared else n) for book, n in counts])
            request = Request(counts, self._pots.draws_of([spec.draw for spec, _ in wanted if spec.draw is not None]))
            places = [place for specs in by_book.values() for place in specs]
            request.holdings = tuple(
                Holding(request, index, spec, name, owner) for index, (spec, name) in enumerate(places)
            )
            self.turns.ask(request)
        except WingbeatError:
            for book in by_book:
                self._admission.forget(book)
            raise
        for holding in request.holdings:
            self.places.add(holding)
        return list(request.holdings)

    def ask_one(self, spec: Spec, name: str, owner: str) -> Holding:
        """As :meth:`ask`, of one."""
        if spec.draw is not None:
            return self.ask([(spec, name)], owner=owner)[0]
        book = self._admission.books.get(spec.key) or self._book(spec)
        request = Request(book.alone)
        holding = Holding(request, 0, spec, name, owner)
        request.holdings = (holding,)
        self.turns.ask(request)
        self.places.add(holding)
        return holding

    def _book(self, spec: Spec) -> Book:
        """Raises what makes waiting for such a spec pointless."""
        book = self._admission.books.get(spec.key)
        if book is None:
            self._instances.backend_of(spec)
            holds = self._pots.holds_of(spec)
            book = Book(spec.key, spec, holds=holds, is_shared=spec.reuse is Reuse.SHARED)
            self._admission.books[spec.key] = book
        return book

    # --- let in, leaving

    def let_in(self, request: Request) -> None:
        now = self.turns.clock()
        is_left = False
        for holding, slot in zip(request.holdings, request.slots, strict=True):
            holding.since = now
            self._instances.admit(slot, request, now)
            slot.tenant.meter.wait.add(now - request.asked_at)
            is_left |= holding.count == 0
        if is_left:  # an owner left some of it
            for holding in request.holdings:
                if holding.count == 0:
                    self._returns.give_back(holding.slot, now)
        if self.places.is_any_fetched and request.holdings:
            owner = request.holdings[0].owner
            if self.places.fetched(owner) and self.places.is_waiting(owner):
                self.give_up_fetched(owner)

    def give_up_fetched(self, owner: str) -> None:
        """What an owner has and does not use must not be what somebody waits for who has what the owner waits for."""
        for holding in self.places.fetched(owner):
            if holding.request.state is TicketState.LET_IN:
                self.leave(holding)

    def leave(self, holding: Holding, *, is_lost: bool = False) -> asyncio.Task[None] | None:
        """One lease of a place less, or one that waited for it; the last gives it back."""
        if holding.count == 0:  # it was ended before
            return None
        holding.count -= 1
        request = holding.request
        is_in = request.state is TicketState.LET_IN
        if is_lost and is_in:
            self._returns.retire(holding.slot)
        if holding.count:
            return None
        self.places.remove(holding)
        is_last = len(request.holdings) == 1 or not any(other.count for other in request.holdings)
        if is_last and request.state is TicketState.WAITING:
            self.turns.withdraw(request)
        if is_last:
            request.holdings = ()  # else they would keep each other until the garbage collector comes
        if not is_in:
            return None
        slot = holding.slot
        now = self.turns.clock()
        slot.tenant.meter.hold.add(now - holding.since)
        return self._returns.give_back(slot, now)
