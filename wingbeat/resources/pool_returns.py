"""Instances that are given back: cleaned, put away for the next one, or closed.

Whatever takes time here runs in a task of the pool's own: whoever gave back may be cancelled, it goes on to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from wingbeat.core.errors import WingbeatError
from wingbeat.resources.admission import Slot
from wingbeat.resources.backend import Instance, Priced, late_s_of
from wingbeat.resources.guard import at_once, guarded
from wingbeat.resources.ledger import Ledger
from wingbeat.resources.pool_leftovers import Leftovers
from wingbeat.resources.pool_tenants import Tenant, Works
from wingbeat.resources.specs import ResourceFailed, Reuse
from wingbeat.resources.states import ResourceState
from wingbeat.resources.turns import Turns

logger = logging.getLogger("wingbeat.resources")

END_BY_NAME_S = 1.0
"""What a look by name may take to end once it took too long: another one follows."""


class Returns:
    """What becomes of slots that nobody uses any more."""

    def __init__(
        self,
        works: Works,
        ledger: Ledger,
        leftovers: Leftovers,
        *,
        on_idle: Callable[[Slot], None],
    ) -> None:
        """``on_idle`` is told of an instance that waits for its next user."""
        self._works = works
        self._ledger = ledger
        self._leftovers = leftovers
        self._on_idle = on_idle
        self.turns: Turns
        self.is_closed = False

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
            self.quarantine(slot, tenant, ResourceFailed("its holder found it lost"))
            return self._begin_close(slot, tenant)
        return self._clean(slot, tenant, now)

    def _clean(self, slot: Slot, tenant: Tenant, now: float) -> asyncio.Task[None] | None:
        spec = tenant.spec
        is_used_up = spec.max_uses is not None and tenant.num_uses >= spec.max_uses
        if self.is_closed or tenant.is_retired or (tenant.was_used and (spec.reuse is Reuse.NEVER or is_used_up)):
            return self._begin_close(slot, tenant)
        if not tenant.was_used or spec.reuse is Reuse.SHARED:
            slot.move(ResourceState.READY)
            self.put_away(slot, tenant, now, is_checked=False)
            return None
        slot.move(ResourceState.RESETTING)
        tenant.meter.num_resets += 1
        if tenant.immediate is None:
            return self._works.give(tenant, self._reset(slot, tenant, None, now), "reset")
        try:
            rest = at_once(tenant.immediate.renew, spec, doing="reset")
        except ResourceFailed as fault:
            self.quarantine(slot, tenant, fault)
            return self._begin_close(slot, tenant)
        if rest is not None:
            return self._works.give(tenant, self._reset(slot, tenant, rest, now), "reset")
        self._is_clean(slot, tenant, now)
        return None

    def _begin_close(self, slot: Slot, tenant: Tenant) -> asyncio.Task[None]:
        slot.move(ResourceState.CLOSED)
        self.turns.admission.detach(slot)
        return self._works.give(tenant, self._close(slot, tenant), "close")

    async def _reset(self, slot: Slot, tenant: Tenant, rest: Coroutine[Any, Any, None] | None, began_at: float) -> None:
        instance, spec = tenant.instance, tenant.spec
        assert instance is not None
        try:
            timeout_s, end_s, doing = spec.reset_timeout_s, spec.close_timeout_s, f"the reset of a {spec.title}"
            await guarded(rest or instance.reset(), timeout_s=timeout_s, doing=doing, end_s=end_s)
            if rest is None:
                await guarded(instance.check(), timeout_s=timeout_s, doing=f"the check of a {spec.title}", end_s=end_s)
        except WingbeatError as fault:
            tenant.is_doubtful = True
            self.quarantine(slot, tenant, fault)
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
        self.put_away(slot, tenant, now, is_checked=True)

    def put_away(self, slot: Slot, tenant: Tenant, now: float, *, is_checked: bool) -> None:
        """Ready for the next one, who may be waiting."""
        if self.is_closed or tenant.is_retired or slot.is_going:
            self._begin_close(slot, tenant)
            return
        tenant.is_checked = is_checked
        self.turns.rest(slot, now)
        tenant.is_checked = False
        if slot.state is ResourceState.READY:  # nobody took it
            self._on_idle(slot)

    def end_evicted(self, slot: Slot) -> None:
        """An idle one that was told to go."""
        tenant: Tenant = slot.tenant
        self._works.give(tenant, self._close(slot, tenant), "close")

    def quarantine(self, slot: Slot, tenant: Tenant, fault: WingbeatError) -> None:
        logger.warning("a %s resource is not used again: %s", tenant.spec.title, fault.message)
        slot.move(ResourceState.QUARANTINED)
        self.turns.admission.detach(slot)
        tenant.meter.num_quarantined += 1

    async def _close(self, slot: Slot, tenant: Tenant) -> None:
        try:
            await self.end_instance(slot, tenant)
        finally:
            tenant.work = None
            tenant.move_out(self.turns.clock())
            self.turns.gone(slot)

    async def end_instance(self, slot: Slot, tenant: Tenant) -> None:
        instance, meter = tenant.instance, tenant.meter
        assert instance is not None
        if slot.state is ResourceState.QUARANTINED:
            slot.move(ResourceState.CLOSED)
        await self.close(tenant, instance)
        if isinstance(instance, Priced):
            meter.priced.pop(instance, None)
            meter.ended_cost += instance.cost

    async def close(self, tenant: Tenant, instance: Instance) -> None:
        """Should that fail it is ended by its name, now or later."""
        try:
            closing = instance.close()
            timeout_s, doing = tenant.spec.close_timeout_s, f"closing a {tenant.spec.title}"
            await guarded(closing, timeout_s=timeout_s, doing=doing, end_s=timeout_s)
        except WingbeatError as fault:
            logger.warning("a resource is ended by its name: %s", fault.message)
            tenant.meter.num_leaked += await self.reap(tenant) if tenant.handles else 1
        else:
            for handle in tenant.handles:
                self._seen_to(tenant, handle, is_sure=not tenant.is_doubtful)

    async def reap(self, tenant: Tenant) -> int:
        """End by name what could not be ended otherwise; how much of it may be left."""
        num_left = 0
        for handle in tenant.handles:
            try:
                reaping = tenant.backend.reap(handle)
                was_there = await guarded(
                    reaping, timeout_s=tenant.spec.close_timeout_s, doing=f"ending {handle!r}", end_s=END_BY_NAME_S
                )
            except WingbeatError as error:
                num_left += 1
                logger.warning("a %s may be left, and is looked for again: %s", tenant.spec.title, error.message)
                self._leftovers.expect(tenant.backend, handle)
            else:
                self._seen_to(tenant, handle, is_sure=was_there)
        return num_left

    def _seen_to(self, tenant: Tenant, handle: str, *, is_sure: bool) -> None:
        """It is gone; unless what was asked for last may yet be made."""
        late_s = late_s_of(tenant.backend)
        if is_sure or not late_s:
            self._ledger.ended(tenant.spec.kind, handle)
        else:
            self._leftovers.expect(tenant.backend, handle, after_s=late_s)
