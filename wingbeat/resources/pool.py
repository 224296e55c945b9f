"""The pool: leases of resources, let in fairly, cleaned for certain.

Invariants: an instance that is not shared is held by at most one owner and name; every lease is given back exactly
once, however it ends (its block, its owner's end, the pool's end, cancellation at any await); giving back runs to
its end, since it belongs to the pool and not to the task that was cancelled; the budgets are never exceeded, by
instances that start and close either.

    hold (lined up) ─▶ let in ─▶ started or checked ─▶ Lease ─▶ end ─▶ reset or close
    pool_desk, turns   admission    pool_instances                        pool_returns
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from wingbeat.resources.admission import Admission, Slot
from wingbeat.resources.backend import Backends
from wingbeat.resources.backends import default_backends
from wingbeat.resources.budgets import BudgetPots, Budgets
from wingbeat.resources.ledger import Ledger, state_folder
from wingbeat.resources.meters import Meters
from wingbeat.resources.pool_breakers import StartBreakers
from wingbeat.resources.pool_desk import Desk
from wingbeat.resources.pool_idle import IdleSweep
from wingbeat.resources.pool_instances import Instances
from wingbeat.resources.pool_leases import Holding, Lease, ManyLeases
from wingbeat.resources.pool_leftovers import Leftovers
from wingbeat.resources.pool_returns import Returns
from wingbeat.resources.pool_tenants import Works
from wingbeat.resources.pots import TicketState
from wingbeat.resources.reaper import look
from wingbeat.resources.remote_servers import Find
from wingbeat.resources.specs import ResourceFailed, ResourceLost, Spec
from wingbeat.resources.stats import BudgetStats, ClassStats
from wingbeat.resources.turns import Turns

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
        self._ledger = Ledger(self._folder)
        self._works = Works()
        self._leftovers = Leftovers(self._works, self._ledger, clock)
        self._breakers = StartBreakers(clock)
        self._returns = Returns(self._works, self._ledger, self._leftovers, on_idle=self._on_idle)
        self._instances = Instances(
            self._backends, self._ledger, works=self._works, returns=self._returns, breakers=self._breakers
        )
        self._desk = Desk(admission, self._pots, self._instances, self._returns)
        self._places = self._desk.places
        self._turns = Turns(admission, clock, on_let_in=self._desk.let_in, on_evicted=self._returns.end_evicted)
        self._instances.turns = self._returns.turns = self._desk.turns = self._turns
        self._instances.meters = Meters(self._turns, self._pots, wait_s=wait_s)
        self._sweep = IdleSweep(admission, self._turns, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
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
            holdings = self._desk.ask([(spec, "") for spec in wanted], owner=owner)
            self._places.fetch(owner, holdings)
            if self._places.is_waiting(owner):
                self._desk.give_up_fetched(owner)

    async def enter(self, lease: Lease, holding: Holding | None = None, *, wait_s: float | None) -> Lease:
        """Begin a lease: in ``holding``, or in the place that its owner has by this name or fetched ahead, or in a new
        one in line."""
        if holding is None:
            self._check_open()
            if self._breakers.is_any_broken:
                wait_s = await self._wait_for_a_try({lease.name: lease.spec}, lease.owner, wait_s)
            if lease.owner:
                holding = self._desk.held(lease.spec, lease.name, lease.owner)
            if holding is None:
                holding = self._desk.ask_one(lease.spec, lease.name, lease.owner)
            if self._places.is_any_fetched and holding.request.state is TicketState.WAITING:
                self._desk.give_up_fetched(lease.owner)
        try:
            if not holding.is_ready():
                wait_s = self._wait_s if wait_s is None else wait_s
                while not holding.is_ready():
                    await self._turns.change_of(holding.request, wait_s)
        except BaseException:
            self._desk.leave(holding)
            raise
        lease.begin(holding, self._instances.use(holding.slot))
        return lease

    async def enter_all(self, specs: Mapping[str, Spec], *, owner: str, wait_s: float | None) -> dict[str, Lease]:
        """Begin several leases, all of them or none."""
        self._check_open()
        if self._breakers.is_any_broken:
            wait_s = await self._wait_for_a_try(specs, owner, wait_s)
        holdings = self._desk.hold_all(specs, owner=owner)
        if self._places.is_any_fetched and self._places.is_waiting(owner):
            self._desk.give_up_fetched(owner)
        leases: dict[str, Lease] = {}
        try:
            for name, spec in specs.items():
                lease = Lease(self, spec, name=name, owner=owner, wait_s=wait_s)
                leases[name] = await self.enter(lease, holdings.pop(name), wait_s=wait_s)
        except BaseException:
            for holding in holdings.values():
                self._desk.leave(holding)
            for lease in leases.values():
                self.end(lease)
            raise
        return leases

    async def _wait_for_a_try(self, specs: Mapping[str, Spec], owner: str, wait_s: float | None) -> float | None:
        """Where starts of such specs kept failing, until it is worth another try; outside of all lines.

        Returns how long may be waited from now on.
        """
        left_s = wait_s = self._wait_s if wait_s is None else wait_s
        began = self._clock()
        for name, spec in specs.items():
            if not (owner and self._desk.has(spec, name, owner)):
                is_there = functools.partial(self._desk.is_there, spec)
                await self._breakers.ready(spec, owner=owner, wait_s=left_s, is_there=is_there)
                if wait_s is not None:  # in whole seconds: those who wait equally long are held in one list
                    left_s = max(0.0, wait_s - (self._clock() - began) // 1)
        self._check_open()
        return left_s

    # --- ends

    def end(self, lease: Lease, *, is_lost: bool = False) -> asyncio.Task[None] | None:
        """The end of one lease; what cleans up after it, where that takes time."""
        holding = lease.end()
        return None if holding is None else self._desk.leave(holding, is_lost=is_lost)

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
        self._breakers.cut(owner, fault)
        return await self._cut(self._places.of(owner), fault)

    async def close(self) -> None:
        """End every lease and instance; whoever waits for one gets ResourceFailed.  Twice is harmless."""
        self._closed = self._returns.is_closed = True
        self._closing.set()
        fault = ResourceFailed("the resource pool is closed; no further leases")
        self._breakers.cut(None, fault)
        await self._cut(self._places.all(), fault)
        for slot in list(self._admission.idle):
            self._admission.evict(slot)
        self._turns.look(())
        self._turns.close()
        self._sweep.close()
        self._leftovers.close()
        looking = (self._reaping, self._leftovers.looking)
        await self._works.finish(unwanted=[task for task in looking if task is not None])
        await self._instances.close()
        self._ledger.close()

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
                work = self._desk.leave(holding)
                if work is not None:
                    works.append(work)
            holding.request.wake()
        await self.finished(works)
        return num_leases

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
        if self._admission.books or self._works.tasks:
            raise ConfigError(
                "this resource pool belongs to another event loop and still holds resources there: make one inside"
                " each asyncio.run (`async with Resources() as pool`), or use SyncResources from synchronous code"
            )
        self._loop = loop
        self._turns.close()  # its timers were of the other loop
        self._sweep.close()
        self._leftovers.arm()
        self._closing = asyncio.Event()
        self._reaping = self._works.spawn(self._reap(), "reap")

    async def _reap(self) -> None:
        """End what processes that are gone have left, and look again for what may have come after the first look."""
        try:
            again_s = (await look(self._folder, backends=self._backends)).again_s
            while again_s is not None and not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(again_s):
                        await self._closing.wait()
                        return
                again_s = (await look(self._folder, backends=self._backends)).again_s
        except (OSError, WingbeatError) as error:
            logger.warning("what dead processes left was not looked for in %s: %s", self._folder, error)

    def _on_idle(self, slot: Slot) -> None:
        """An instance waits for its next lease."""
        spec: Spec = slot.book.spec
        if spec.idle_ttl_s is not None and not self._closed:
            self._sweep.expect(slot.idle_since + spec.idle_ttl_s)
        if self._breakers.is_any_broken:
            self._breakers.there_is_one(spec)

    # --- figures

    @property
    def num_leases(self) -> int:
        """Leases now held."""
        return sum(len(holding.leases) for holding in self._places.all())

    @property
    def num_idle(self) -> int:
        """Instances that wait for their next lease."""
        return self._admission.num_idle

    def fetched(self, owner: str) -> list[Spec]:
        """What an owner has fetched ahead, or waits for, and not leased yet."""
        return [holding.spec for holding in self._places.fetched(owner)]

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
        for spec in self._breakers.waiting:
            self._instances.meter_of(spec)
            waiting[spec.kind, spec.label] += 1
        now = self._clock()
        classes = sorted(self._instances.classes.items())
        return [meter.snapshot(now, idle=idle[key], waiting=waiting[key]) for key, meter in classes]

    def budgets(self) -> list[BudgetStats]:
        """How much of each budget is in use now."""
        return self._pots.snapshot(self._clock())


def of_process(
    processes: int, *, urls: Sequence[str] = (), key: str | None = None, find: Find | None = None
) -> ResourcePool:
    """The pool of one of several client processes that share this machine; an async context manager.

    ``urls`` of resources servers: everything but in-process objects is leased there; ``find`` asks for them anew.
    """
    local = Resources(Budgets.of_machine(processes=processes))
    if not urls:
        return local
    from wingbeat.resources.remote import RemoteResources  # with all that speaks HTTP

    return RemoteResources(urls, key, local=local, find=find)
