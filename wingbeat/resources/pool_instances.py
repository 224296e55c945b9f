"""The instances of a pool: starting, checking, cleaning, replacing and closing them.

Whatever takes time here runs in a task of the pool's own: whoever waits for it may be cancelled, it goes on to its
end.  At most one task works on an instance at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from wingbeat.core.errors import ConfigError, WingbeatError
from wingbeat.resources.admission import Slot
from wingbeat.resources.backend import Backend, Backends, Immediate, Instance, Priced
from wingbeat.resources.guard import at_once, guarded
from wingbeat.resources.ledger import Ledger
from wingbeat.resources.meters import Meters
from wingbeat.resources.specs import ResourceFailed, Reuse, Spec
from wingbeat.resources.states import ResourceState
from wingbeat.resources.stats import Meter
from wingbeat.resources.turns import Request, Turns

logger = logging.getLogger("wingbeat.resources")

UNWANTED_S = 5.0
"""What a pool that closes gives the ending of what others left: the next pool goes on with it."""


class Tenant:
    """What the pool knows of a slot."""

    __slots__ = (
        "backend",
        "busy_since",
        "handles",
        "immediate",
        "instance",
        "is_checked",
        "is_lost",
        "is_retired",
        "is_starting",
        "live_since",
        "meter",
        "num_uses",
        "requests",
        "spec",
        "was_used",
        "work",
    )

    def __init__(self, spec: Spec, backend: Backend, meter: Meter, now: float) -> None:
        self.spec = spec
        self.backend = backend
        self.meter = meter
        self.instance: Instance | None = None
        self.immediate: Immediate | None = None
        self.work: asyncio.Task[None] | None = None
        self.requests: list[Request] = []
        """Those that wait for ``work``."""
        self.handles: list[str] = []
        """In the ledger."""
        self.num_uses = 0
        self.was_used = False
        """Handed out: what nobody ever saw needs no cleaning."""
        self.is_checked = False
        """A moment ago."""
        self.is_lost = False
        """Its holder says so."""
        self.is_starting = False
        self.is_retired = False
        """Serves those who have it and nobody else."""
        self.busy_since: float | None = None
        self.live_since = now


class Instances:
    """What becomes of slots that :class:`wingbeat.resources.admission.Admission` has decided upon."""

    def __init__(self, backends: Backends, ledger: Ledger, *, on_idle: Callable[[float], None]) -> None:
        """``on_idle`` is told when an instance will have been unused for too long."""
        self._on_idle = on_idle
        self._backends = backends
        self._ledger = ledger
        self.turns: Turns
        self.meters: Meters
        self.classes: dict[tuple[str, str], Meter] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def backend_of(self, spec: Spec) -> Backend:
        """Checks the spec, too.  Raises ConfigError, UnsupportedField, DependencyMissing."""
        try:
            backend = self._backends[spec.kind]
        except KeyError:
            known = ", ".join(self._backends) or "none"
            raise ConfigError(f"kind: expected one that this pool has ({known}), got {spec.kind!r}") from None
        if getattr(backend, "meters", self.meters) is None:
            backend.meters = self.meters  # pyright: ignore[reportAttributeAccessIssue]
        self.meters.check(getattr(spec, "budget", ""))
        backend.check(spec)
        return backend

    def meter_of(self, spec: Spec) -> Meter:
        key = (spec.kind, spec.label)
        meter = self.classes.get(key)
        if meter is None:
            meter = self.classes[key] = Meter(*key)
        return meter

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of the pool's own."""
        task = asyncio.get_running_loop().create_task(work, name=f"wingbeat-resource-{name}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # --- handing out

    def admit(self, slot: Slot, request: Request, now: float) -> None:
        """A request was given this slot: start it, check it, or nothing."""
        tenant: Tenant | None = slot.tenant
        if tenant is None:
            tenant = self._move_in(slot, now)
            tenant.work = self.spawn(self._bring_up(slot), "start")
        elif tenant.busy_since is None and tenant.work is None and not tenant.is_checked:
            self._verify(slot, tenant)
        if tenant.busy_since is None:
            tenant.busy_since = now
            tenant.meter.busy.begin(now)
        if tenant.spec.reuse is Reuse.SHARED:
            self._use_shared(slot, tenant)
        if tenant.work is not None:
            tenant.requests.append(request)

    def _use_shared(self, slot: Slot, tenant: Tenant) -> None:
        """Counted when one joins: all who join before it has started would use it at once."""
        tenant.num_uses += 1
        if tenant.num_uses == tenant.spec.max_uses:
            tenant.is_retired = True
            self.turns.admission.detach(slot)

    def use(self, slot: Slot) -> Any:
        """It is handed out; returns its value."""
        tenant: Tenant = slot.tenant
        tenant.was_used = True
        if not slot.book.is_shared:
            tenant.num_uses += 1
        assert tenant.instance is not None
        return tenant.instance.value

    def _move_in(self, slot: Slot, now: float) -> Tenant:
        spec: Spec = slot.book.spec
        tenant = slot.tenant = Tenant(spec, self._backends[spec.kind], self.meter_of(spec), now)
        tenant.meter.live.begin(now)
        return tenant

    def _verify(self, slot: Slot, tenant: Tenant) -> None:
        """It may have died while it was idle."""
        instance = tenant.instance
        assert instance is not None
        try:
            rest = (
                at_once(tenant.immediate.verify, tenant.spec, doing="check") if tenant.immediate else instance.check()
            )
        except ResourceFailed as fault:
            tenant.work = self.spawn(self._replace(slot, tenant, fault), "replace")
            return
        if rest is not None:
            tenant.work = self.spawn(self._recheck(slot, tenant, rest), "check")

    async def _recheck(self, slot: Slot, tenant: Tenant, rest: Coroutine[Any, Any, None]) -> None:
        try:
            await guarded(rest, timeout_s=tenant.spec.reset_timeout_s, doing=f"the check of a {tenant.spec.title}")
        except WingbeatError as fault:
            await self._replace(slot, tenant, fault)
            return
        self._is_ready(slot, tenant)

    async def _replace(self, slot: Slot, tenant: Tenant, fault: WingbeatError) -> None:
        """Another one for those who were to have this one."""
        self._quarantine(slot, tenant, fault)
        await self._end_instance(slot, tenant)
        now = self.turns.clock()
        self._move_out(tenant, now)
        if slot.num_users == 0:
            self.turns.gone(slot)
            return
        fresh = self.turns.admission.replace(slot)
        successor = self._move_in(fresh, now)
        successor.requests, tenant.requests = tenant.requests, []
        successor.num_uses = fresh.num_users if fresh.book.is_shared else 0
        successor.busy_since = now
        successor.meter.busy.begin(now)
        successor.work, tenant.work = tenant.work, None
        for request in successor.requests:
            request.slots = [fresh if held is slot else held for held in request.slots]
        self.turns.look(fresh.book.pots)  # who came while a shared one was missing joins this one
        await self._bring_up(fresh)

    async def _bring_up(self, slot: Slot) -> None:
        """Start an instance; cancelled if nobody wants it any more."""
        tenant: Tenant = slot.tenant
        spec, meter = tenant.spec, tenant.meter
        began_at = self.turns.clock()
        meter.num_starts += 1
        fault: WingbeatError | None = None
        try:
            tenant.is_starting = slot.num_users > 0
            if not tenant.is_starting:
                raise ResourceFailed("nobody wants it any more")
            start = tenant.backend.start(spec, started=lambda handle: self._note(tenant, handle))
            tenant.instance = await guarded(
                start, timeout_s=spec.start_timeout_s, doing=f"the start of a {spec.title} resource"
            )
        except WingbeatError as error:
            fault = error
        finally:
            tenant.is_starting = False
            if tenant.instance is None:
                meter.num_start_failures += fault is not None and slot.num_users > 0
                await self._failed(slot, tenant, fault)
        if tenant.instance is not None:
            meter.start.add(self.turns.clock() - began_at)
            if isinstance(tenant.instance, Immediate):
                tenant.immediate = tenant.instance
            if isinstance(tenant.instance, Priced):
                meter.priced[tenant.instance] = None
            slot.move(ResourceState.READY)
            self._is_ready(slot, tenant)

    def _note(self, tenant: Tenant, handle: str) -> None:
        self._ledger.started(tenant.spec.kind, handle)
        tenant.handles.append(handle)

    async def _failed(self, slot: Slot, tenant: Tenant, fault: WingbeatError | None) -> None:
        """A start failed or was cancelled: the back-end has cleaned up; what it may have left is ended here."""
        tenant.meter.num_leaked += await self._reap(tenant)
        tenant.work = None
        self.turns.admission.detach(slot)
        slot.move(ResourceState.CLOSED)
        self._move_out(tenant, self.turns.clock())
        self._tell(tenant, fault or ResourceFailed(f"the start of a {tenant.spec.title} resource was cancelled"))
        self.turns.gone(slot)

    async def _reap(self, tenant: Tenant) -> int:
        """End by name what could not be ended otherwise; how much of it may be left."""
        num_left = 0
        for handle in tenant.handles:
            try:
                reaping = tenant.backend.reap(handle)
                await guarded(reaping, timeout_s=tenant.spec.close_timeout_s, doing=f"ending {handle!r}")
                self._ledger.ended(tenant.spec.kind, handle)
            except WingbeatError as error:
                num_left += 1
                logger.warning("a %s may be left: %s", tenant.spec.title, error.message)
        return num_left

    def _is_ready(self, slot: Slot, tenant: Tenant) -> None:
        """``work`` is done, and well."""
        tenant.work = None
        if slot.num_users == 0:  # nobody waited for it
            if slot.state is ResourceState.LEASED:
                slot.move(ResourceState.READY)
            self._put_away(slot, tenant, self.turns.clock(), is_checked=True)
        elif slot.state is ResourceState.READY:
            slot.move(ResourceState.LEASED)
        self._tell(tenant, None)

    @staticmethod
    def _tell(tenant: Tenant, fault: WingbeatError | None) -> None:
        requests, tenant.requests = tenant.requests, []
        for request in requests:
            if fault is not None and request.fault is None:
                request.fault = fault
            request.wake()

    # --- taking back

    def retire(self, slot: Slot) -> None:
        """A holder found it lost: nobody else gets it."""
        tenant: Tenant = slot.tenant
        tenant.is_lost = True
        self.turns.admission.detach(slot)

    def give_back(self, slot: Slot, now: float) -> asyncio.Task[None] | None:
        """One user less; the task that cleans up, where there is one."""
        tenant: Tenant = slot.tenant
        slot.num_users -= 1
        if slot.num_users:
            return None
        if tenant.busy_since is not None:
            tenant.meter.busy.end(tenant.busy_since, now)
            tenant.busy_since = None
        if tenant.work is not None:
            if tenant.is_starting:
                tenant.is_starting = False
                self.turns.admission.detach(slot)
                tenant.work.cancel()
            return tenant.work
        if slot.state is ResourceState.CLOSED:  # it never started
            return None
        if tenant.is_lost:
            self._quarantine(slot, tenant, ResourceFailed("its holder found it lost"))
            return self._begin_close(slot, tenant)
        return self._clean(slot, tenant, now)

    def _clean(self, slot: Slot, tenant: Tenant, now: float) -> asyncio.Task[None] | None:
        spec = tenant.spec
        is_used_up = spec.max_uses is not None and tenant.num_uses >= spec.max_uses
        if self.is_closed or tenant.is_retired or (tenant.was_used and (spec.reuse is Reuse.NEVER or is_used_up)):
            return self._begin_close(slot, tenant)
        if not tenant.was_used or spec.reuse is Reuse.SHARED:
            slot.move(ResourceState.READY)
            self._put_away(slot, tenant, now, is_checked=False)
            return None
        slot.move(ResourceState.RESETTING)
        tenant.meter.num_resets += 1
        if tenant.immediate is None:
            return self._begin(slot, tenant, self._reset(slot, tenant, None, now), "reset")
        try:
            rest = at_once(tenant.immediate.renew, spec, doing="reset")
        except ResourceFailed as fault:
            self._quarantine(slot, tenant, fault)
            return self._begin_close(slot, tenant)
        if rest is not None:
            return self._begin(slot, tenant, self._reset(slot, tenant, rest, now), "reset")
        self._is_clean(slot, tenant, now)
        return None

    def _begin(self, slot: Slot, tenant: Tenant, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        tenant.work = self.spawn(work, name)
        return tenant.work

    def _begin_close(self, slot: Slot, tenant: Tenant) -> asyncio.Task[None]:
        slot.move(ResourceState.CLOSED)
        self.turns.admission.detach(slot)
        return self._begin(slot, tenant, self._close(slot, tenant), "close")

    async def _reset(self, slot: Slot, tenant: Tenant, rest: Coroutine[Any, Any, None] | None, began_at: float) -> None:
        instance, spec = tenant.instance, tenant.spec
        assert instance is not None
        try:
            timeout_s, doing = spec.reset_timeout_s, f"the reset of a {spec.title}"
            if rest is not None:
                await guarded(rest, timeout_s=timeout_s, doing=doing)
            else:
                await guarded(instance.reset(), timeout_s=timeout_s, doing=doing)
                await guarded(instance.check(), timeout_s=timeout_s, doing=f"the check of a {spec.title}")
        except WingbeatError as fault:
            self._quarantine(slot, tenant, fault)
            slot.move(ResourceState.CLOSED)
            await self._close(slot, tenant)
            return
        tenant.work = None
        self._is_clean(slot, tenant, began_at)

    def _is_clean(self, slot: Slot, tenant: Tenant, began_at: float) -> None:
        now = self.turns.clock()
        tenant.meter.reset.add(now - began_at)
        slot.move(ResourceState.READY)
        tenant.was_used = False
        self._put_away(slot, tenant, now, is_checked=True)

    def _put_away(self, slot: Slot, tenant: Tenant, now: float, *, is_checked: bool) -> None:
        """Ready for the next one, who may be waiting."""
        if self.is_closed or tenant.is_retired or slot.is_going:
            self._begin_close(slot, tenant)
            return
        tenant.is_checked = is_checked
        self.turns.rest(slot, now)
        tenant.is_checked = False
        ttl_s = tenant.spec.idle_ttl_s
        if ttl_s is not None and slot.state is ResourceState.READY:
            self._on_idle(slot.idle_since + ttl_s)

    def end_evicted(self, slot: Slot) -> None:
        """An idle one that was told to go."""
        tenant: Tenant = slot.tenant
        self._begin(slot, tenant, self._close(slot, tenant), "close")

    def _quarantine(self, slot: Slot, tenant: Tenant, fault: WingbeatError) -> None:
        logger.warning("a %s resource is not used again: %s", tenant.spec.title, fault.message)
        slot.move(ResourceState.QUARANTINED)
        self.turns.admission.detach(slot)
        tenant.meter.num_quarantined += 1

    async def _close(self, slot: Slot, tenant: Tenant) -> None:
        try:
            await self._end_instance(slot, tenant)
        finally:
            tenant.work = None
            self._move_out(tenant, self.turns.clock())
            self.turns.gone(slot)

    async def _end_instance(self, slot: Slot, tenant: Tenant) -> None:
        instance, meter = tenant.instance, tenant.meter
        assert instance is not None
        if slot.state is ResourceState.QUARANTINED:
            slot.move(ResourceState.CLOSED)
        try:
            closing = instance.close()
            await guarded(closing, timeout_s=tenant.spec.close_timeout_s, doing=f"closing a {tenant.spec.title}")
            for handle in tenant.handles:
                self._ledger.ended(tenant.spec.kind, handle)
        except WingbeatError as fault:
            logger.warning("a resource is ended by its name: %s", fault.message)
            meter.num_leaked += await self._reap(tenant) if tenant.handles else 1
        if isinstance(instance, Priced):
            meter.priced.pop(instance, None)
            meter.ended_cost += instance.cost

    def _move_out(self, tenant: Tenant, now: float) -> None:
        tenant.meter.live.end(tenant.live_since, now)
        if tenant.busy_since is not None:
            tenant.meter.busy.end(tenant.busy_since, now)
            tenant.busy_since = None

    async def close(self, *, unwanted: asyncio.Task[None] | None = None) -> None:
        """Wait for all that goes on, then end the back-ends.  What is ``unwanted`` is cut short once that is all."""
        while self.tasks:
            if self.tasks != {unwanted}:
                await asyncio.wait(self.tasks - {unwanted})
            elif unwanted is not None:
                await asyncio.wait({unwanted}, timeout=UNWANTED_S)
                unwanted.cancel()
                await asyncio.wait({unwanted})
        made = getattr(self._backends, "made", self._backends)
        for backend in made.values():
            try:
                await guarded(backend.close(), timeout_s=30.0, doing=f"closing the back-end {backend.kind}")
            except WingbeatError as fault:
                logger.warning("%s", fault.message)
        self._ledger.close()
