"""Leases that clients of a resources server hold, each in a task of the server's own.

A grant ends when its client gives it back, when its owner is released, when its client is silent for four heartbeats,
when it is held for too long, and with the server.  Whatever ends it, the pool then cleans up as after any lease.

    WAITING ──▶ HELD ──▶ OVER        WAITING ──▶ OVER (it failed, or was taken back)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.errors import ConflictError, LimitReached
from wingbeat.core.lending_protocol import POLL_S, SILENT_HEARTBEATS
from wingbeat.resources import Lease, ResourceLost, Resources, Spec
from wingbeat.server.resources.calls import Calls

logger = logging.getLogger(__name__)

MAX_ENDED = 10_000
"""Grants that ended, of which it is known why."""
CLEAN_S = 20.0
"""How long giving back waits for the cleaning, which goes on."""
SWEEP_PER_HEARTBEAT = 4


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
        """What the pool knows an owner as; nobody's stays nobody's."""
        return f"{self.account}/{self.name}/{name}" if name else ""


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
        return self.leases[index].value


class Grants:
    """All of one server; of one event loop."""

    def __init__(
        self, pool: Resources, config: ResourcesConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._config = config
        self._clock = clock
        self._grants: dict[str, Grant] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Why those ended that were ended under their holders."""
        self._fetched: dict[tuple[Client, str], int] = {}
        """By owner: how many were fetched ahead, until it is released."""
        self._seen: dict[Client, float] = {}
        self._held: Counter[str] = Counter()
        """By account, with what was fetched ahead."""

    @property
    def num_leases(self) -> int:
        return sum(len(grant.specs) for grant in self._grants.values())

    @property
    def num_clients(self) -> int:
        return len(self._seen)

    def seen(self, client: Client) -> None:
        """It lives."""
        self._seen[client] = self._clock()

    # --- leasing

    async def lease(
        self, lease_id: str, client: Client, *, owner: str, specs: Mapping[str, Spec], wait_s: float | None
    ) -> Grant | None:
        """Begin a grant, or go on waiting for it; None while its turn has not come.

        Raises what the pool raises, LimitReached, and ConflictError for an id of another's or of one that is over.
        """
        grant = self._grants.get(lease_id)
        if grant is None:
            if lease_id in self._ended:
                raise ResourceLost(self._ended[lease_id])
            self._take(client, len(specs))
            grant = self._begin(lease_id, client, owner=owner, specs=specs, wait_s=wait_s)
        elif grant.client != client:
            raise ConflictError("another client has a lease of this idempotency_key", param="idempotency_key")
        grant.num_polls += 1
        try:
            await asyncio.wait_for(grant.changed.wait(), POLL_S)
        except TimeoutError:
            return None
        finally:
            grant.num_polls -= 1
            grant.seen_at = self._clock()
        if grant.held_since is None:
            if not grant.task.cancelled():
                grant.task.result()  # raises why there is none
            raise ResourceLost(grant.reason)
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
        try:
            async with self._pool.lease_all(grant.specs, owner=owner, wait_s=wait_s) as leases:
                if grant.over.is_set():
                    return
                grant.leases = [leases[name] for name in grant.specs]
                grant.calls = [Calls(clock=self._clock) for _ in leases]
                grant.held_since = self._clock()
                grant.changed.set()
                await grant.over.wait()
                await asyncio.gather(*(calls.close() for calls in grant.calls))
                if grant.is_lost:
                    raise ResourceLost(grant.reason)
        except ResourceLost:
            if not grant.is_lost:
                raise

    def _over(self, grant: Grant, task: asyncio.Task[None]) -> None:
        self._grants.pop(grant.lease_id, None)
        self._give(grant.client, len(grant.specs))
        fault = None if task.cancelled() else task.exception()
        self._note(grant.lease_id, grant.reason or (str(fault) if fault is not None else "this lease is over"))
        if fault is not None and grant.held_since is not None:
            logger.warning("the lease %s ended: %s", grant.lease_id, fault)
        grant.changed.set()

    def held(self, lease_id: str, client: Client) -> Grant:
        """Raises ResourceLost for what is not held any more, or never was: this server may be another's successor."""
        grant = self._grants.get(lease_id)
        if grant is None or grant.client != client or grant.held_since is None or grant.over.is_set():
            reason = grant.reason if grant is not None and grant.client == client else self._ended.get(lease_id, "")
            raise ResourceLost(reason or "this resources server has no such lease; it may have been started anew")
        grant.seen_at = self._clock()
        return grant

    # --- ends

    async def end(self, lease_id: str, client: Client, *, is_lost: bool = False) -> None:
        """Given back by its client; also before it was ever asked for, by a request that overtook the other."""
        grant = self._grants.get(lease_id)
        if grant is None:
            self._note(lease_id, "this lease was given back")
        elif grant.client == client:
            grant.is_lost = is_lost
            await self._end([grant], "this lease was given back")

    async def release(self, client: Client, owner: str) -> int:
        """End all that an owner has; how many leases that were."""
        mine = [grant for grant in self._grants.values() if grant.client == client and grant.owner == owner]
        reason = f"the resources of {owner!r} were released, its episode is over"
        num_held = sum(len(grant.leases) for grant in mine)
        await self._end(mine, reason)
        fetched = self._fetched.pop((client, owner), 0)
        if fetched:
            self._give(client, fetched)
        await self._pool.release_owner(client.owner(owner))
        return num_held

    async def _end(self, grants: list[Grant], reason: str) -> None:
        """And wait a while until they are cleaned up."""
        for grant in grants:
            grant.reason = grant.reason or reason
            grant.over.set()
            if grant.held_since is None:  # it waits in line
                grant.task.cancel()
        if grants:
            await asyncio.wait([grant.task for grant in grants], timeout=CLEAN_S)

    def prefetch(self, client: Client, *, owner: str, specs: Mapping[str, Spec]) -> None:
        """Raises as the pool does, and LimitReached."""
        self._take(client, len(specs))
        try:
            self._pool.prefetch(specs, owner=client.owner(owner))
        except BaseException:
            self._give(client, len(specs))
            raise
        key = (client, owner)
        self._fetched[key] = self._fetched.get(key, 0) + len(specs)

    def heartbeat(self, client: Client, lease_ids: tuple[str, ...]) -> dict[str, str]:
        """Those of the leases that are over, with the reason."""
        now = self._clock()
        lost: dict[str, str] = {}
        for lease_id in lease_ids:
            grant = self._grants.get(lease_id)
            if grant is not None and grant.client == client and not grant.over.is_set():
                grant.seen_at = now
            else:
                reason = grant.reason if grant is not None and grant.client == client else ""
                lost[lease_id] = reason or self._ended.get(lease_id) or "this resources server has no such lease"
        return lost

    async def watch(self) -> None:
        """End what silent clients left, and what is held for too long; until it is cancelled."""
        while True:
            await asyncio.sleep(self._config.heartbeat_s / SWEEP_PER_HEARTBEAT)
            await self.sweep()

    async def sweep(self) -> None:
        now, silence_s = self._clock(), SILENT_HEARTBEATS * self._config.heartbeat_s
        silent = [g for g in self._grants.values() if not g.num_polls and now - g.seen_at > silence_s]
        most_s = self._config.max_hold_s
        old = [g for g in self._grants.values() if g.held_since is not None and now - g.held_since > most_s]
        gone = [client for client, seen_at in self._seen.items() if now - seen_at > silence_s]
        for client in gone:
            if not any(grant.client == client and grant.num_polls for grant in self._grants.values()):
                del self._seen[client]
        left = [key for key in self._fetched if key[0] not in self._seen]
        for grant in silent:
            logger.info("the lease %s ends: its client %s is silent", grant.lease_id, grant.client.name)
        works = [
            self._end([g for g in silent if not g.over.is_set()], f"its client was silent for {silence_s:g} s"),
            self._end([g for g in old if not g.over.is_set()], _TOO_LONG.format(most_s)),
            *(self.release(client, owner) for client, owner in left),
        ]
        await asyncio.gather(*works)

    async def close(self) -> None:
        """End all."""
        await self._end(list(self._grants.values()), "the resources server ended")

    # --- quotas

    def _take(self, client: Client, count: int) -> None:
        """Raises LimitReached."""
        held, most, total = self._held[client.quota], self._config.leases_per_client, self._config.total_leases
        if held + count > most:
            raise LimitReached(
                f"this client holds {held} resources and asks for {count}, of {most} (resources.leases_per_client):"
                " give some back first"
            )
        if sum(self._held.values()) + count > total:
            raise LimitReached(f"all clients together hold {total} resources (resources.total_leases)")
        self._held[client.quota] += count

    def _give(self, client: Client, count: int) -> None:
        self._held[client.quota] -= count
        if not self._held[client.quota]:
            del self._held[client.quota]

    def _note(self, lease_id: str, reason: str) -> None:
        self._ended[lease_id] = reason
        self._ended.move_to_end(lease_id)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


_TOO_LONG = "it was held for more than {:g} s (resources.max_hold_s)"
