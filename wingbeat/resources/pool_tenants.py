"""What a pool knows of each of its instances, and the tasks that work on them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from wingbeat.core.errors import WingbeatError
from wingbeat.resources.backend import Backend, Immediate, Instance
from wingbeat.resources.specs import Spec
from wingbeat.resources.stats import Meter
from wingbeat.resources.turns import Request

UNWANTED_S = 5.0
"""What a pool that closes gives the ending of what others left, or it could not end: the next pool goes on with it."""


class Tenant:
    """Of one slot, from the decision to start it until it is gone."""

    __slots__ = (
        "backend",
        "busy_since",
        "handles",
        "immediate",
        "instance",
        "is_checked",
        "is_doubtful",
        "is_given_up",
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
        self.is_doubtful = False
        """Something was asked for whose outcome is not known: it may yet appear."""
        self.is_starting = False
        self.is_given_up = False
        """Its start failed; should it end well after all, nobody takes it."""
        self.is_retired = False
        """Serves those who have it and nobody else."""
        self.busy_since: float | None = None
        self.live_since = now

    def move_out(self, now: float) -> None:
        """It is gone."""
        self.meter.live.end(self.live_since, now)
        if self.busy_since is not None:
            self.meter.busy.end(self.busy_since, now)
            self.busy_since = None

    def tell(self, fault: WingbeatError | None) -> None:
        """Those who wait, what came of it."""
        requests, self.requests = self.requests, []
        for request in requests:
            if fault is not None and request.fault is None:
                request.fault = fault
            request.wake()


class Works:
    """The tasks of a pool's own: whoever waits for one may be cancelled, it goes on to its end."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(work, name=f"wingbeat-resource-{name}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def give(self, tenant: Tenant, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """The one that works on an instance; there is at most one at a time."""
        tenant.work = self.spawn(work, name)
        return tenant.work

    async def finish(self, *, unwanted: Collection[asyncio.Task[None]] = ()) -> None:
        """Wait for all of them; those that are ``unwanted`` are cut short once nothing else is left."""
        while wanted := self.tasks.difference(unwanted):
            await asyncio.wait(wanted)
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=UNWANTED_S)
            late = set(self.tasks)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
