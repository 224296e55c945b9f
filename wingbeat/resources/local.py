"""The pool of in-process objects.

Invariants: an object is held by at most one lease; a lease is given back exactly once, however it
ends (its block, its owner's end, the pool's end, cancellation); giving back always runs to its end,
since it belongs to the pool and not to the task that was cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from wingbeat.resources.specs import LocalSpec, ResourceFailed, Reuse
from wingbeat.resources.states import ResourceState, advance

logger = logging.getLogger("wingbeat.resources")


class _Resource:
    """One object and its state."""

    __slots__ = ("shelf", "spec", "state", "value")

    def __init__(self, spec: LocalSpec, shelf: _Shelf) -> None:
        self.spec = spec
        self.shelf = shelf
        self.state = ResourceState.STARTING
        self.value: Any = None

    def move(self, to: ResourceState) -> None:
        self.state = advance(self.state, to)


class _Shelf:
    """What all leases of one spec share: the objects that wait for their next lease, and the limit."""

    __slots__ = ("idle", "num_users", "slots")

    def __init__(self, limit: int | None) -> None:
        self.idle: list[_Resource] = []
        self.num_users = 0
        """Leases held, waited for or being cleaned up."""
        self.slots = None if limit is None else asyncio.Semaphore(limit)


class LocalLease:
    """A held object."""

    def __init__(self, resource: _Resource, *, name: str, owner: str) -> None:
        self._resource = resource
        self._name = name
        self.owner = owner
        self.ended = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def value(self) -> Any:
        """The object.  Raises ResourceFailed once the lease ended: it may serve someone else by now."""
        if self.ended:
            raise ResourceFailed(f"the lease {self._name!r} of {self.owner!r} has ended; take a new one")
        return self._resource.value


class LocalPool:
    """Makes, lends, resets and closes objects; of one event loop.

    ``async with LocalPool() as pool, pool.lease(spec, owner=episode.id) as lease: lease.value ...``

    Hooks that are no coroutine functions run on the loop and should be quick.
    """

    def __init__(self) -> None:
        self._shelves: dict[LocalSpec, _Shelf] = {}
        self._leases: dict[str, set[LocalLease]] = defaultdict(set)
        self._cleaning: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def num_leases(self) -> int:
        """Leases now held."""
        return sum(map(len, self._leases.values()))

    @property
    def num_idle(self) -> int:
        """Objects that wait for their next lease."""
        return sum(len(shelf.idle) for shelf in self._shelves.values())

    @asynccontextmanager
    async def lease(self, spec: LocalSpec, *, name: str = "", owner: str = "") -> AsyncGenerator[LocalLease]:
        """Hold an object for the block; waits for its turn where the spec has a limit.

        Raises ResourceFailed if it cannot be made or the pool is closed.
        """
        lease = LocalLease(await self._acquire(spec), name=name, owner=owner)
        self._leases[owner].add(lease)
        try:
            yield lease
        finally:
            await self._end([lease])

    async def release_owner(self, owner: str) -> int:
        """End all leases of an owner and wait until their objects are cleaned up; returns how many there were."""
        if not owner:
            raise ValueError("owner: expected a name, got an empty one, which is shared by all unowned leases")
        return await self._end(list(self._leases.get(owner, ())))

    async def close(self) -> None:
        """End every lease and object; whoever waits for one gets ResourceFailed.  Twice is harmless."""
        self._closed = True
        await self._end([lease for leases in self._leases.values() for lease in leases])
        idle = [resource for shelf in self._shelves.values() for resource in shelf.idle]
        for shelf in self._shelves.values():
            shelf.idle.clear()
        for resource in idle:
            self._clean(_close(resource))
        if self._cleaning:
            await asyncio.shield(asyncio.gather(*self._cleaning))

    async def _acquire(self, spec: LocalSpec) -> _Resource:
        shelf = self._shelves.setdefault(spec, _Shelf(spec.limit))
        shelf.num_users += 1
        has_slot, resource = False, None
        try:
            if shelf.slots is not None:
                has_slot = await shelf.slots.acquire()
            if self._closed:
                raise ResourceFailed("the resource pool is closed; no further leases")
            resource = shelf.idle.pop() if shelf.idle else await _make(spec, shelf)
            if self._closed:
                self._clean(_close(resource))
                raise ResourceFailed("the resource pool was closed while the resource was made")
            resource.move(ResourceState.LEASED)
            return resource
        finally:
            if resource is None or resource.state is not ResourceState.LEASED:
                self._leave(spec, shelf, has_slot=has_slot)

    def _leave(self, spec: LocalSpec, shelf: _Shelf, *, has_slot: bool) -> None:
        """One user less; a shelf that nobody uses and that holds nothing is forgotten."""
        if shelf.slots is not None and has_slot:
            shelf.slots.release()
        shelf.num_users -= 1
        if shelf.num_users == 0 and not shelf.idle:
            self._shelves.pop(spec, None)

    async def _end(self, leases: list[LocalLease]) -> int:
        """Give back those not yet given back; cleaning goes on if the caller is cancelled."""
        ending = [lease for lease in leases if not lease.ended]
        tasks: list[asyncio.Task[None]] = []
        for lease in ending:
            lease.ended = True
            owned = self._leases[lease.owner]
            owned.discard(lease)
            if not owned:
                del self._leases[lease.owner]
            tasks.append(self._clean(self._give_back(lease._resource)))
        if tasks:
            await asyncio.shield(asyncio.gather(*tasks))
        return len(ending)

    def _clean(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name="wingbeat-resource-cleanup")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        return task

    async def _give_back(self, resource: _Resource) -> None:
        try:
            if resource.spec.reuse is Reuse.AFTER_RESET and not self._closed:
                await self._reset(resource)
            else:
                await _close(resource)
        finally:
            self._leave(resource.spec, resource.shelf, has_slot=True)

    async def _reset(self, resource: _Resource) -> None:
        """Back on the shelf if reset and health check succeed, else quarantined and closed."""
        spec = resource.spec
        resource.move(ResourceState.RESETTING)
        assert spec.reset is not None
        fault = await _fault_of(spec.reset, resource.value)
        if fault is None and spec.health is not None:
            health = spec.health

            async def check(value: Any) -> None:
                if not await _call(health, value):
                    raise ResourceFailed("its health check said no")

            fault = await _fault_of(check, resource.value)
        if fault is not None:
            logger.warning("a resource is not used again: %s: %s", type(fault).__name__, fault)
            resource.move(ResourceState.QUARANTINED)
            await _close(resource)
        elif self._closed:
            resource.move(ResourceState.READY)
            await _close(resource)
        else:
            resource.move(ResourceState.READY)
            resource.shelf.idle.append(resource)


async def _make(spec: LocalSpec, shelf: _Shelf) -> _Resource:
    resource = _Resource(spec, shelf)
    try:
        resource.value = await _call(spec.factory)
    except Exception as error:
        resource.move(ResourceState.CLOSED)
        raise ResourceFailed(f"a resource could not be made: {type(error).__name__}: {error}") from error
    resource.move(ResourceState.READY)
    return resource


async def _close(resource: _Resource) -> None:
    resource.move(ResourceState.CLOSED)
    if resource.spec.close is not None:
        fault = await _fault_of(resource.spec.close, resource.value)
        if fault is not None:
            logger.warning("closing a resource failed: %s: %s", type(fault).__name__, fault)


async def _call(hook: Callable[..., Any], *arguments: Any) -> Any:
    result = hook(*arguments)
    return await result if inspect.isawaitable(result) else result


async def _fault_of(hook: Callable[[Any], Any], value: Any) -> BaseException | None:
    """What a hook raised: a user's hook may raise anything, and cleaning must go on."""
    (result,) = await asyncio.gather(_call(hook, value), return_exceptions=True)
    return result if isinstance(result, BaseException) else None
