"""Leases that clients of a resources server hold, each in a task of the server's own.

A grant ends when its client gives it back, when its owner is released, when its client is silent for four heartbeats,
when it is held for too long, and with the server.  Whatever ends it, what is done with it is ended first, and the pool
then cleans up as after any lease.

    WAITING ──▶ HELD ──▶ OVER        WAITING ──▶ OVER (it failed, or was taken back)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.errors import ConflictError, WingbeatError
from wingbeat.core.lending_protocol import POLL_S, SILENT_HEARTBEATS
from wingbeat.resources import Lease, ResourceFailed, ResourceLost, Resources, Spec
from wingbeat.server.resources.calls import KEPT_S, Calls, again
from wingbeat.server.resources.fetched import Ahead, Fetched
from wingbeat.server.resources.limits import LendingLimits

logger = logging.getLogger(__name__)

MAX_ENDED = 10_000
"""Grants that ended, of which it is known why."""
CLEAN_S = 20.0
"""How long giving back waits for the cleaning, which goes on."""
SWEEP_PER_HEARTBEAT = 4
KEPT_BYTES = 512 * 2**20
"""Of the results of all calls together; beyond it those who have most of them lose theirs."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who holds something."""

    account: str
    """Of its key."""
    name: str
    """As it calls itself: one process of several that share a key."""
    quota: str
    """Whose quota it uses up."""

    def owner(self, name: str) -> str:
        """What the pool knows an owner as; nobody's stays nobody's.  No two clients have an owner in common."""
        return f"{self.account}/{quote(self.name, safe='')}/{name}" if name else ""


class Grant:
    """One lease, or several that were asked for together."""

    def __init__(self, lease_id: str, client: Client, *, owner: str, specs: Mapping[str, Spec], now: float) -> None:
        self.lease_id = lease_id
        self.client = client
        self.owner = owner
        self.specs = dict(specs)
        self.seen_at = now
        self.held_since: float | None = None
        self.num_polls = 0
        """Requests that wait for it now: as long as one does, its client lives."""
        self.leases: list[Lease] = []
        self.calls: list[Calls] = []
        self.changed = asyncio.Event()
        """Set once it is held, or over."""
        self.over = asyncio.Event()
        """Set to end it."""
        self.reason = ""
        self.is_lost = False
        self.task: asyncio.Task[None]

    def value(self, index: int) -> Any:
        """Raises ResourceLost once it is over."""
        if self.over.is_set():
            raise ResourceLost(self.reason)
        return self.leases[index].value

    def end(self, reason: str) -> None:
        """Tell it to end.  From now on nothing of it begins any more, and what runs is cancelled."""
        if self.over.is_set():
            return
        self.reason = reason
        self.over.set()
        for calls in self.calls:
            calls.stop()
        if self.held_since is None:  # it waits in line
            self.task.cancel()


class Grants:
    """All of one server; of one event loop."""

    def __init__(
        self,
        pool: Resources,
        config: ResourcesConfig,
        *,
        limits: LendingLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._config = config
        self._clock = clock
        self._quota = (limits or LendingLimits(config, clock=clock)).leases
        self._grants: dict[str, Grant] = {}
        self._ended: OrderedDict[str, WingbeatError] = OrderedDict()
        """What those are told who ask for one that is over."""
        self._ahead: dict[Client, Ahead] = {}
        self._releases: dict[tuple[Client, str], asyncio.Task[None]] = {}
        """Of owners, under way."""
        self._closed = False

    @property
    def num_leases(self) -> int:
        return sum(len(grant.specs) for grant in self._grants.values())

    @property
    def num_clients(self) -> int:
        """That hold, wait for or have fetched something."""
        return len({grant.client for grant in self._grants.values()} | self._ahead.keys())

    def seen(self, client: Client) -> None:
        """It lives: what it fetched ahead is kept.  Of leases it tells by name."""
        ahead = self._ahead.get(client)
        if ahead is not None:
            ahead.seen_at = self._clock()

    # --- leasing

    async def lease(
        self, lease_id: str, client: Client, *, owner: str, specs: Mapping[str, Spec], wait_s: float | None
    ) -> Grant | None:
        """Begin a grant, or go on waiting for it; None while its turn has not come.

        Raises what the pool raises, LimitReached, and ConflictError for an id of another's.
        """
        grant = self._grants.get(lease_id)
        if grant is None:
            if lease_id in self._ended:
                raise again(self._ended[lease_id])
            self._check_open()
            self._take(client, owner, specs)
            grant = self._begin(lease_id, client, owner=owner, specs=specs, wait_s=wait_s)
        elif grant.client != client:
            raise ConflictError(
                "another client has a lease of this idempotency_key: choose 128 random bits", param="idempotency_key"
            )
        grant.num_polls += 1
        try:
            await asyncio.wait_for(grant.changed.wait(), POLL_S)
        except TimeoutError:
            return None
        finally:
            grant.num_polls -= 1
            grant.seen_at = self._clock()
        if grant.held_since is None:
            raise again(self._ended[lease_id])
        return grant

    def _begin(
        self, lease_id: str, client: Client, *, owner: str, specs: Mapping[str, Spec], wait_s: float | None
    ) -> Grant:
        grant = Grant(lease_id, client, owner=owner, specs=specs, now=self._clock())
        most = self._config.max_wait_s
        wait_s = most if wait_s is None else min(wait_s, most)
        grant.task = asyncio.create_task(self._hold(grant, wait_s), name=f"grant-{lease_id[:8]}")
        self._grants[lease_id] = grant
        grant.task.add_done_callback(lambda task: self._over(grant, task))
        return grant

    async def _hold(self, grant: Grant, wait_s: float) -> None:
        """The whole life of a grant."""
        owner = grant.client.owner(grant.owner)
        release = self._releases.get((grant.client, grant.owner))
        if release is not None:  # it would end this one, too
            await asyncio.wait([release])
        try:
            async with self._pool.lease_all(grant.specs, owner=owner, wait_s=wait_s) as leases:
                if grant.over.is_set():
                    return
                grant.leases = [leases[name] for name in grant.specs]
                grant.calls = [Calls(clock=self._clock) for _ in leases]
                grant.held_since = self._clock()
                grant.changed.set()
                await grant.over.wait()
                if not all(await asyncio.gather(*(calls.close() for calls in grant.calls))):
                    grant.is_lost = True  # what still runs there must reach nobody else's
                    logger.warning("calls of the lease %s do not end: what it holds is not used again", grant.lease_id)
                if grant.is_lost:
                    raise ResourceLost(grant.reason)
        except ResourceLost:
            if not grant.is_lost:
                raise

    def _over(self, grant: Grant, task: asyncio.Task[None]) -> None:
        self._grants.pop(grant.lease_id, None)
        self._quota.give(grant.client.quota, len(grant.specs))
        fault = None if task.cancelled() else task.exception()
        if fault is not None and not isinstance(fault, WingbeatError):
            logger.error("the lease %s ended by a fault of this server", grant.lease_id, exc_info=fault)
            fault = ResourceFailed(f"unexpected {type(fault).__name__} in the resources server; its log has more")
        elif fault is not None and grant.held_since is not None:
            logger.warning("the lease %s ended: %s", grant.lease_id, fault)
        if fault is None or grant.reason:
            fault = ResourceLost(grant.reason or "this lease is over")
        fault.message = fault.message.replace(repr(grant.client.owner(grant.owner)), repr(grant.owner))
        self._note(grant.lease_id, fault)
        grant.changed.set()

    def held(self, lease_id: str, client: Client) -> Grant:
        """Raises ResourceLost for what is not held any more, or never was: this server may be another's successor."""
        grant = self._grants.get(lease_id)
        if grant is None or grant.client != client or grant.held_since is None or grant.over.is_set():
            raise ResourceLost(self._why_not(lease_id, client))
        grant.seen_at = self._clock()
        return grant

    def _why_not(self, lease_id: str, client: Client) -> str:
        grant = self._grants.get(lease_id)
        if grant is not None:
            waits = "this lease waits for its turn: ask for it again" if grant.client == client else _UNKNOWN
            return (grant.reason if grant.client == client else "") or waits
        ended = self._ended.get(lease_id)
        return _UNKNOWN if ended is None else ended.message

    # --- ends

    async def end(self, lease_id: str, client: Client, *, is_lost: bool = False) -> None:
        """Given back by its client; also before it was ever asked for, by a request that overtook the other."""
        grant = self._grants.get(lease_id)
        if grant is None:
            if lease_id not in self._ended:
                self._note(lease_id, ResourceLost("this lease was given back"))
        elif grant.client == client:
            grant.is_lost = grant.is_lost or is_lost
            grant.end("this lease was given back")
            await self._cleaned([grant.task])

    async def release(self, client: Client, owner: str) -> int:
        """End all that an owner has; how many leases that were."""
        num_held = sum(len(grant.leases) for grant in self._of(client, owner))
        await self._cleaned([self._release(client, owner)])
        return num_held

    def _of(self, client: Client, owner: str) -> list[Grant]:
        return [grant for grant in self._grants.values() if grant.client == client and grant.owner == owner]

    def _release(self, client: Client, owner: str) -> asyncio.Task[None]:
        """Begin to end all that an owner has now, and not what it asks for after this."""
        works: list[asyncio.Task[None]] = []
        for grant in self._of(client, owner):
            grant.end(f"the resources of {owner!r} were released, its episode is over")
            works.append(grant.task)
        self._forget_fetched(client, owner)
        key = (client, owner)
        if key in self._releases:
            works.append(self._releases[key])
        task = asyncio.create_task(self._released(works, client.owner(owner)), name="release")
        self._releases[key] = task
        task.add_done_callback(lambda done: self._releases.get(key) is done and self._releases.pop(key))
        return task

    async def _released(self, works: list[asyncio.Task[None]], owner: str) -> None:
        if works:  # first: what still runs in a box must end before somebody else gets it
            await asyncio.wait(works)
        await self._pool.release_owner(owner)

    def _forget_fetched(self, client: Client, owner: str) -> None:
        ahead = self._ahead.get(client)
        fetched = ahead and ahead.owners.pop(owner, None)
        if fetched:
            self._quota.give(client.quota, fetched.count)
        if ahead and not ahead.owners:
            del self._ahead[client]

    async def _cleaned(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Wait for it, but not for ever: it goes on."""
        waiting = list(tasks)
        if waiting:
            await asyncio.wait(waiting, timeout=CLEAN_S)

    def prefetch(self, call_id: str, client: Client, *, owner: str, specs: Mapping[str, Spec]) -> None:
        """The same ``call_id`` again does nothing.  Raises as the pool does, and LimitReached."""
        ahead = self._ahead.get(client)
        if ahead is not None and owner in ahead.owners and call_id in ahead.owners[owner].calls:
            return
        self._check_open()
        self._is_full(client, len(specs))
        self._quota.take(client.quota, len(specs))
        try:
            self._pool.prefetch(specs, owner=client.owner(owner))
        except BaseException:
            self._quota.give(client.quota, len(specs))
            raise
        now = self._clock()
        ahead = self._ahead.setdefault(client, Ahead(seen_at=now))
        fetched = ahead.owners.setdefault(owner, Fetched(since=now, asked_at=now))
        fetched.asked_at = now
        fetched.add(call_id, len(specs))

    def heartbeat(self, client: Client, lease_ids: tuple[str, ...]) -> dict[str, str]:
        """Those of the leases that are over, with the reason."""
        now = self._clock()
        lost: dict[str, str] = {}
        for lease_id in lease_ids:
            grant = self._grants.get(lease_id)
            if grant is not None and grant.client == client and not grant.over.is_set():
                grant.seen_at = now
            else:
                lost[lease_id] = self._why_not(lease_id, client)
        return lost

    async def watch(self) -> None:
        """End what silent clients left, and what is held for too long; until it is cancelled."""
        while True:
            await asyncio.sleep(self._config.heartbeat_s / SWEEP_PER_HEARTBEAT)
            self.sweep()

    def sweep(self) -> None:
        """Waits for nothing: a box that cannot be cleaned must not keep what others left."""
        now, silence_s = self._clock(), SILENT_HEARTBEATS * self._config.heartbeat_s
        most_s = self._config.max_hold_s
        waiting = {grant.client for grant in self._grants.values() if grant.num_polls}
        self._bound_results()
        for grant in self._grants.values():
            if grant.over.is_set():
                continue
            if not grant.num_polls and now - grant.seen_at > silence_s:
                logger.info("the lease %s ends: its client %r is silent", grant.lease_id, grant.client.name)
                grant.end(f"its client was silent for {silence_s:g} s")
            elif grant.held_since is not None and now - grant.held_since > most_s:
                grant.end(f"it was held for more than {most_s:g} s (resources.max_hold_s)")
        for client, ahead in list(self._ahead.items()):
            is_silent = now - ahead.seen_at > silence_s and client not in waiting
            for owner, fetched in list(ahead.owners.items()):
                if is_silent or (now - fetched.since > most_s and not self._of(client, owner)):
                    self._release(client, owner)

    def _bound_results(self) -> None:
        kept = [calls for grant in self._grants.values() for calls in grant.calls]
        for calls in kept:
            calls.forget()
        total = sum(calls.kept_bytes for calls in kept)
        kept.sort(key=lambda calls: calls.kept_bytes)
        while total > KEPT_BYTES:
            most = kept.pop()
            total -= most.kept_bytes
            most.drop()

    async def close(self) -> None:
        """End all, and begin nothing more; twice is harmless."""
        self._closed = True
        for grant in self._grants.values():
            grant.end("the resources server ended")
        await self._cleaned([*(grant.task for grant in self._grants.values()), *self._releases.values()])

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceFailed("this resources server ends now: no further leases")

    # --- quotas

    def _take(self, client: Client, owner: str, specs: Mapping[str, Spec]) -> None:
        """Room for a lease.  Raises LimitReached, RequestError where there never can be any."""
        count = len(specs)
        if self._is_full(client, count) and owner:
            fetched = Counter(spec.key for spec in self._pool.fetched(client.owner(owner)))
            count -= (fetched & Counter(spec.key for spec in specs.values())).total()  # it takes those over
        if count:
            self._quota.check(client.quota, count)
        self._quota.add(client.quota, len(specs))

    def _is_full(self, client: Client, count: int) -> bool:
        """Whether it has no room for so many more, once it is counted what it really has."""
        if count <= self._quota.room(client.quota):
            return False
        self._recount()
        return count > self._quota.room(client.quota)

    def _recount(self) -> None:
        """What was fetched ahead counts until it is released; some of it may be leased by now, or given up.

        An owner with nothing of it is forgotten, once its request cannot come again: whoever takes all that it fetches
        and releases nobody would have more and more of them.
        """
        now = self._clock()
        for client, ahead in list(self._ahead.items()):
            for owner, fetched in list(ahead.owners.items()):
                count = len(self._pool.fetched(client.owner(owner)))
                if count < fetched.count:
                    self._quota.give(client.quota, fetched.count - count)
                    fetched.count = count
                if not count and now - fetched.asked_at > KEPT_S:
                    self._forget_fetched(client, owner)

    def _note(self, lease_id: str, fault: WingbeatError) -> None:
        self._ended[lease_id] = again(fault)
        self._ended.move_to_end(lease_id)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


_UNKNOWN = "this resources server has no such lease; it may have been started anew"
