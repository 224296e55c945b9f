"""The pool: leases of resources, let in fairly, cleaned for certain.

Invariants: an instance that is not shared is held by at most one owner and name; every lease is given back exactly
once, however it ends (its block, its owner's end, the pool's end, cancellation at any await); giving back runs to
its end, since it belongs to the pool and not to the task that was cancelled; the budgets are never exceeded, by
instances that start and close either.

    hold (lined up) ─▶ let in ─▶ started or checked ─▶ Lease ─▶ end ─▶ reset or close
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from wingbeat.core.errors import ConfigError, WingbeatError
from wingbeat.core.ports import Clock, ResourcePool
from wingbeat.resources.admission import Admission, Book
from wingbeat.resources.backend import Backends
from wingbeat.resources.backends import default_backends
from wingbeat.resources.budgets import BudgetPots, Budgets, check_together
from wingbeat.resources.ledger import Ledger, state_folder
from wingbeat.resources.meters import Meters
from wingbeat.resources.pool_idle import IdleSweep
from wingbeat.resources.pool_instances import Instances
from wingbeat.resources.pool_leases import Holding, Lease, ManyLeases
from wingbeat.resources.pool_places import Places
from wingbeat.resources.pots import TicketState
from wingbeat.resources.reaper import reap
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Reuse, Spec
from wingbeat.resources.stats import BudgetStats, ClassStats
from wingbeat.resources.turns import Request, Turns

logger = logging.getLogger("wingbeat.resources")

WAIT_S = 600.0
"""How long a lease waits for its turn, unless told otherwise: what waits for ever is a deadlock that nobody sees."""


class Resources:
    """Starts, lends, resets, checks and closes resources of all kinds; of one event loop.

    ``async with Resources() as pool, pool.lease(spec, name="repo", owner=episode.id) as lease: lease.value ...``

    ``budgets`` bound what all instances hold together (None: this machine's processors, memory and GPUs).
    ``ledger`` is the folder in which it notes what would outlive this process (None: this user's own); a new pool
    ends what processes that are gone have left there.  ``wait_s`` is how long a lease waits at most for its turn.
    """

    def __init__(
        self,
        budgets: Budgets | None = None,
        *,
        backends: Backends | None = None,
        ledger: Path | None = None,
        wait_s: float | None = WAIT_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._wait_s = wait_s
        self._pots = BudgetPots(Budgets.of_machine() if budgets is None else budgets, clock())
        admission = self._admission = Admission(max_idle=self._pots.max_idle)
        admission.rate_pots = [*self._pots.requests.values(), *self._pots.tokens.values()]
        admission.cost_pots = [*self._pots.costs.values()]
        self._folder = state_folder() if ledger is None else ledger
        self._backends = default_backends() if backends is None else backends
        self._instances = Instances(self._backends, Ledger(self._folder), on_idle=self._on_idle)
        self._turns = Turns(admission, clock, on_let_in=self._let_in, on_evicted=self._instances.end_evicted)
        self._sweep = IdleSweep(admission, self._turns, clock)
        self._instances.turns = self._turns
        self._instances.meters = Meters(self._turns, self._pots, wait_s=wait_s)
        self._places = Places()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._bind()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # --- leasing

    def lease(
        self, spec: Spec, *, name: str = "", owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Hold a resource for the block, once it is one's turn.

        An owner that leases a ``name`` again while it holds it gets the same instance; a lease without a name is
        always another one.  Raises, when the block is entered, ResourceFailed where it cannot be started,
        ResourceWait after ``wait_s`` in line (None: the pool's), ConfigError for a spec that is larger than the
        pool's budgets or another than the name stands for, UnsupportedField for what its back-end cannot do.
        """
        if not isinstance(spec, Spec):
            raise ConfigError(f"expected a spec, got {type(spec).__name__}; parse_spec(data) makes one of plain data")
        return Lease(self, spec, name=name, owner=owner, wait_s=wait_s)

    def lease_all(
        self, specs: Mapping[str, Spec], *, owner: str = "", wait_s: float | None = None
    ) -> AbstractAsyncContextManager[dict[str, Lease]]:
        """Hold several for the block, by name: all of them or none, so that two who want the same cannot deadlock."""
        return ManyLeases(self, specs, owner=owner, wait_s=wait_s)

    def prefetch(self, specs: Spec | Mapping[str, Spec], *, owner: str) -> None:
        """Ask for what an owner will lease soon: it is let in and started meanwhile, all of it or nothing.

        Its lease of an equal spec takes it over; ``release_owner`` gives back what it did not lease.  Should it fail,
        the lease tries again.  While its owner waits for something else it is given up, so that nobody waits for what
        is only kept.  Raises as :meth:`lease` what needs no waiting.
        """
        if not owner:
            raise ValueError("owner: expected a name, since what is fetched ahead is somebody's; got an empty one")
        wanted = list(specs.values()) if isinstance(specs, Mapping) else [specs]
        if wanted:
            self._check_open()
            holdings = self._ask([(spec, "") for spec in wanted], owner=owner)
            self._places.fetch(owner, holdings)
            if self._places.is_waiting(owner):
                self._give_up_fetched(owner)

    async def enter(self, lease: Lease, holding: Holding | None = None, *, wait_s: float | None) -> Lease:
        """Begin a lease: in ``holding``, or in the place that its owner has by this name or fetched ahead, or in a new
        one in line."""
        if holding is None:
            self._check_open()
            if lease.owner:
                holding = self._held(lease.spec, lease.name, lease.owner)
            if holding is None:
                holding = self._ask_one(lease.spec, lease.name, lease.owner)
            if self._places.is_any_fetched and holding.request.state is TicketState.WAITING:
                self._give_up_fetched(lease.owner)
        try:
            if not holding.is_ready():
                wait_s = self._wait_s if wait_s is None else wait_s
                while not holding.is_ready():
                    await self._turns.change_of(holding.request, wait_s)
        except BaseException:
            self._leave(holding)
            raise
        lease.begin(holding, self._instances.use(holding.slot))
        return lease

    async def enter_all(self, specs: Mapping[str, Spec], *, owner: str, wait_s: float | None) -> dict[str, Lease]:
        """Begin several leases, all of them or none."""
        self._check_open()
        holdings = self._hold_all(specs, owner=owner)
        if self._places.is_any_fetched and self._places.is_waiting(owner):
            self._give_up_fetched(owner)
        leases: dict[str, Lease] = {}
        try:
            for name, spec in specs.items():
                lease = Lease(self, spec, name=name, owner=owner, wait_s=wait_s)
                leases[name] = await self.enter(lease, holdings.pop(name), wait_s=wait_s)
        except BaseException:
            for holding in holdings.values():
                self._leave(holding)
            for lease in leases.values():
                self.end(lease)
            raise
        return leases

    def _hold_all(self, specs: Mapping[str, Spec], *, owner: str) -> dict[str, Holding]:
        """Places of several; those that are not held already are asked for together.

        What was fetched ahead is taken over where that is all that is wanted; else it goes back and is asked for with
        the rest, since to keep some while waiting for others is how a deadlock begins.
        """
        holdings: dict[str, Holding] = {}
        try:
            for name, spec in specs.items():
                held = self._held(spec, name, owner) if owner else None
                if held is not None:
                    holdings[name] = held
            fetched = [holding for holding in holdings.values() if holding.count == 1]
            is_let_in = all(holding.request.state is TicketState.LET_IN for holding in fetched)
            is_one = len({id(holding.request) for holding in fetched}) == 1
            if fetched and (len(holdings) < len(specs) or not (is_let_in or is_one)):
                for holding in fetched:
                    del holdings[holding.name]
                    self._leave(holding)
            missing = [(spec, name) for name, spec in specs.items() if name not in holdings]
            if missing:
                holdings.update({holding.name: holding for holding in self._ask(missing, owner=owner)})
        except BaseException:
            for holding in holdings.values():
                self._leave(holding)
            raise
        return holdings

    # --- ends

    def end(self, lease: Lease, *, is_lost: bool = False) -> asyncio.Task[None] | None:
        """The end of one lease; what cleans up after it, where that takes time."""
        holding = lease.end()
        return None if holding is None else self._leave(holding, is_lost=is_lost)

    async def finished(self, works: Sequence[asyncio.Task[None]]) -> None:
        """Wait for cleaning, which goes on if the caller is cancelled, and whose failures are the pool's affair."""
        if works:
            await asyncio.wait(works)

    async def release_owner(self, owner: str) -> int:
        """End all that an owner has, waits for or fetched ahead, and wait until it is cleaned up; returns how many
        leases it had."""
        if not owner:
            raise ValueError("owner: expected a name, got an empty one, which is shared by all unowned leases")
        fault = ResourceLost(f"the lease has ended: the resources of {owner!r} were released, its episode is over")
        return await self._cut(self._places.of(owner), fault)

    async def close(self) -> None:
        """End every lease and instance; whoever waits for one gets ResourceFailed.  Twice is harmless."""
        self._closed = self._instances.is_closed = True
        fault = ResourceFailed("the resource pool is closed; no further leases")
        await self._cut(self._places.all(), fault)
        for slot in list(self._admission.idle):
            self._admission.evict(slot)
        self._turns.look(())
        self._turns.close()
        self._sweep.close()
        await self._instances.close(unwanted=self._reaping)

    async def _cut(self, holdings: Iterable[Holding], fault: ResourceFailed) -> int:
        """End places under their holders."""
        num_leases, works = 0, list[asyncio.Task[None]]()
        for holding in holdings:
            num_leases += len(holding.leases)
            if holding.count:
                holding.fault = fault
                for lease in holding.leases:
                    lease.end()
                holding.leases = ()
                holding.count = 1
                work = self._leave(holding)
                if work is not None:
                    works.append(work)
            holding.request.wake()
        await self.finished(works)
        return num_leases

    def _leave(self, holding: Holding, *, is_lost: bool = False) -> asyncio.Task[None] | None:
        """One lease of a place less, or one that waited for it; the last gives it back."""
        if holding.count == 0:  # it was ended before
            return None
        holding.count -= 1
        request = holding.request
        is_in = request.state is TicketState.LET_IN
        if is_lost and is_in:
            self._instances.retire(holding.slot)
        if holding.count:
            return None
        self._places.remove(holding)
        is_last = len(request.holdings) == 1 or not any(other.count for other in request.holdings)
        if is_last and request.state is TicketState.WAITING:
            self._turns.withdraw(request)
        if is_last:
            request.holdings = ()  # else they would keep each other until the garbage collector comes
        if not is_in:
            return None
        slot = holding.slot
        now = self._clock()
        slot.tenant.meter.hold.add(now - holding.since)
        return self._instances.give_back(slot, now)

    # --- places

    def _held(self, spec: Spec, name: str, owner: str) -> Holding | None:
        """What an owner has already by this name, or fetched ahead; one lease more of it."""
        held = self._places.named(owner, name)
        if held is not None:
            if held.spec.key != spec.key:
                raise ConfigError(
                    f"{owner!r} holds {name!r} with another spec: end that lease first, or choose another name",
                    param="name",
                )
            held.count += 1
            return held
        for held in self._places.fetched(owner):
            if held.spec.key != spec.key:
                continue
            if held.request.fault is not None:
                logger.info("what was fetched ahead failed, so the lease tries again: %s", held.request.fault)
                self._leave(held)
                continue
            self._places.take_over(held, name)  # its place counted one lease from the beginning
            return held
        return None

    def _ask(self, wanted: Sequence[tuple[Spec, str]], *, owner: str) -> list[Holding]:
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
            self._turns.ask(request)
        except WingbeatError:
            for book in by_book:
                self._admission.forget(book)
            raise
        for holding in request.holdings:
            self._places.add(holding)
        return list(request.holdings)

    def _ask_one(self, spec: Spec, name: str, owner: str) -> Holding:
        """As :meth:`_ask`, of one."""
        if spec.draw is not None:
            return self._ask([(spec, name)], owner=owner)[0]
        book = self._admission.books.get(spec.key) or self._book(spec)
        request = Request(book.alone)
        holding = Holding(request, 0, spec, name, owner)
        request.holdings = (holding,)
        self._turns.ask(request)
        self._places.add(holding)
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

    def _let_in(self, request: Request) -> None:
        now = self._clock()
        is_left = False
        for holding, slot in zip(request.holdings, request.slots, strict=True):
            holding.since = now
            self._instances.admit(slot, request, now)
            slot.tenant.meter.wait.add(now - request.asked_at)
            is_left |= holding.count == 0
        if is_left:  # an owner left some of it
            for holding in request.holdings:
                if holding.count == 0:
                    self._instances.give_back(holding.slot, now)
        if self._places.is_any_fetched and request.holdings:
            owner = request.holdings[0].owner
            if self._places.fetched(owner) and self._places.is_waiting(owner):
                self._give_up_fetched(owner)

    def _give_up_fetched(self, owner: str) -> None:
        """What an owner has and does not use must not be what somebody waits for who has what the owner waits for."""
        for holding in self._places.fetched(owner):
            if holding.request.state is TicketState.LET_IN:
                self._leave(holding)

    # --- the pool itself

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceFailed("the resource pool is closed; no further leases")
        if asyncio.get_running_loop() is not self._loop:
            self._bind()

    def _bind(self) -> None:
        """Belong to the running loop.  A pool that holds nothing may go on in another one, after ``asyncio.run``."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._admission.books or self._instances.tasks:
            raise ConfigError(
                "this resource pool belongs to another event loop and still holds resources there: make one inside"
                " each asyncio.run (`async with Resources() as pool`), or use SyncResources from synchronous code"
            )
        self._loop = loop
        self._turns.close()  # its timers were of the other loop
        self._sweep.close()
        self._reaping = self._instances.spawn(self._reap(), "reap")

    async def _reap(self) -> None:
        """End what processes that are gone have left."""
        try:
            await reap(self._folder, backends=self._backends)
        except (OSError, WingbeatError) as error:
            logger.warning("what dead processes left was not looked for in %s: %s", self._folder, error)

    def _on_idle(self, at: float) -> None:
        if not self._closed:
            self._sweep.expect(at)

    # --- figures

    @property
    def num_leases(self) -> int:
        """Leases now held."""
        return sum(len(holding.leases) for holding in self._places.all())

    @property
    def num_idle(self) -> int:
        """Instances that wait for their next lease."""
        return self._admission.num_idle

    def snapshot(self) -> list[ClassStats]:
        """Of every class of resources so far, by kind and label."""
        idle: dict[tuple[str, str], int] = defaultdict(int)
        waiting: dict[tuple[str, str], int] = defaultdict(int)
        for slot in self._admission.idle:
            idle[slot.book.spec.kind, slot.book.spec.label] += 1
        for book in self._admission.books.values():
            if book.num_waiting:
                self._instances.meter_of(book.spec)
                waiting[book.spec.kind, book.spec.label] += book.num_waiting
        now = self._clock()
        classes = sorted(self._instances.classes.items())
        return [meter.snapshot(now, idle=idle[key], waiting=waiting[key]) for key, meter in classes]

    def budgets(self) -> list[BudgetStats]:
        """How much of each budget is in use now."""
        return self._pots.snapshot(self._clock())


def of_process(processes: int, *, urls: Sequence[str] = (), key: str | None = None) -> ResourcePool:
    """The pool of one of several client processes that share this machine; an async context manager.

    ``urls`` of resources servers: everything but in-process objects is leased there.
    """
    local = Resources(Budgets.of_machine(processes=processes))
    if not urls:
        return local
    from wingbeat.resources.remote import RemoteResources  # with all that speaks HTTP

    return RemoteResources(urls, key, local=local)
