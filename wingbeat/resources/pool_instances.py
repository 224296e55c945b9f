"""The instances of a pool: started, checked before they are handed out, replaced.

What becomes of them afterwards is in :mod:`wingbeat.resources.pool_returns`.  Whatever takes time runs in a task of the
pool's own: whoever waits for it may be cancelled, it goes on to its end.  At most one task works on an instance at a
time.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from wingbeat.core.errors import ConfigError, WingbeatError
from wingbeat.resources.admission import Slot
from wingbeat.resources.backend import Backend, Backends, Immediate, Priced
from wingbeat.resources.guard import at_once, guarded
from wingbeat.resources.ledger import Ledger
from wingbeat.resources.meters import Meters
from wingbeat.resources.pool_breakers import StartBreakers
from wingbeat.resources.pool_returns import Returns
from wingbeat.resources.pool_tenants import Tenant, Works
from wingbeat.resources.specs import ResourceFailed, Reuse, Spec
from wingbeat.resources.states import ResourceState
from wingbeat.resources.stats import Meter
from wingbeat.resources.turns import Request, Turns

logger = logging.getLogger("wingbeat.resources")


class Instances:
    """What becomes of slots that :class:`wingbeat.resources.admission.Admission` has decided upon."""

    def __init__(
        self, backends: Backends, ledger: Ledger, *, works: Works, returns: Returns, breakers: StartBreakers
    ) -> None:
        self._backends = backends
        self._ledger = ledger
        self._works = works
        self._returns = returns
        self._breakers = breakers
        self.turns: Turns
        self.meters: Meters
        self.classes: dict[tuple[str, str], Meter] = {}

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

    def admit(self, slot: Slot, request: Request, now: float) -> None:
        """A request was given this slot: start it, check it, or nothing."""
        tenant: Tenant | None = slot.tenant
        if tenant is None:
            tenant = self._move_in(slot, now)
            self._works.give(tenant, self._bring_up(slot), "start")
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
            self._works.give(tenant, self._replace(slot, tenant, fault), "replace")
            return
        if rest is not None:
            self._works.give(tenant, self._recheck(slot, tenant, rest), "check")

    async def _recheck(self, slot: Slot, tenant: Tenant, rest: Coroutine[Any, Any, None]) -> None:
        spec = tenant.spec
        doing = f"the check of a {spec.title}"
        try:
            await guarded(rest, timeout_s=spec.reset_timeout_s, doing=doing, end_s=spec.close_timeout_s)
        except WingbeatError as fault:
            await self._replace(slot, tenant, fault)
            return
        self._is_ready(slot, tenant)

    async def _replace(self, slot: Slot, tenant: Tenant, fault: WingbeatError) -> None:
        """Another one for those who were to have this one."""
        self._returns.quarantine(slot, tenant, fault)
        await self._returns.end_instance(slot, tenant)
        now = self.turns.clock()
        tenant.move_out(now)
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
        fault: WingbeatError | None = None
        is_probe: bool | None = None
        try:
            tenant.is_starting = slot.num_users > 0
            if not tenant.is_starting:
                raise ResourceFailed("nobody wants it any more")
            is_probe = self._breakers.begin(spec)
            meter.num_starts += 1
            doing = f"the start of a {spec.title} resource"
            await guarded(self._start(tenant), timeout_s=spec.start_timeout_s, doing=doing, end_s=spec.close_timeout_s)
        except WingbeatError as error:
            fault = error
        finally:
            tenant.is_starting = False
            if is_probe is not None:
                is_failure = tenant.instance is None and fault is not None and slot.num_users > 0
                meter.num_start_failures += is_failure
                failure, is_there = (fault if is_failure else None), tenant.instance is not None
                self._breakers.ended(spec, fault=failure, is_there=is_there, is_probe=is_probe)
            if tenant.instance is None:
                await self._failed(slot, tenant, fault)
            else:
                meter.start.add(self.turns.clock() - began_at)
                self._started(slot, tenant)

    async def _start(self, tenant: Tenant) -> None:
        """Has the instance in its tenant at once: whoever waits here may be cancelled as it comes."""
        instance = await tenant.backend.start(tenant.spec, started=lambda handle: self._note(tenant, handle))
        if tenant.is_given_up:  # it went on though it was cancelled
            await self._returns.close(tenant, instance)
        else:
            tenant.instance = instance

    def _started(self, slot: Slot, tenant: Tenant) -> None:
        if isinstance(tenant.instance, Immediate):
            tenant.immediate = tenant.instance
        if isinstance(tenant.instance, Priced):
            tenant.meter.priced[tenant.instance] = None
        slot.move(ResourceState.READY)
        self._is_ready(slot, tenant)

    def _note(self, tenant: Tenant, handle: str) -> None:
        self._ledger.started(tenant.spec.kind, handle)
        tenant.handles.append(handle)

    async def _failed(self, slot: Slot, tenant: Tenant, fault: WingbeatError | None) -> None:
        """A start failed or was cancelled: the back-end has cleaned up; what it may have left is ended here."""
        tenant.is_given_up = tenant.is_doubtful = True
        tenant.meter.num_leaked += await self._returns.reap(tenant)
        tenant.work = None
        self.turns.admission.detach(slot)
        slot.move(ResourceState.CLOSED)
        tenant.move_out(self.turns.clock())
        tenant.tell(fault or ResourceFailed(f"the start of a {tenant.spec.title} resource was cancelled"))
        self.turns.gone(slot)

    def _is_ready(self, slot: Slot, tenant: Tenant) -> None:
        """``work`` is done, and well."""
        tenant.work = None
        if slot.num_users == 0:  # nobody waited for it
            if slot.state is ResourceState.LEASED:
                slot.move(ResourceState.READY)
            self._returns.put_away(slot, tenant, self.turns.clock(), is_checked=True)
        elif slot.state is ResourceState.READY:
            slot.move(ResourceState.LEASED)
        tenant.tell(None)

    async def close(self) -> None:
        """End the back-ends, once nothing of theirs is left."""
        made = getattr(self._backends, "made", self._backends)
        for backend in made.values():
            try:
                await guarded(backend.close(), timeout_s=30.0, doing=f"closing the back-end {backend.kind}")
            except WingbeatError as fault:
                logger.warning("%s", fault.message)
