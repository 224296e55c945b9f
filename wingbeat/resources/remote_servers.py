"""Which of several resources servers an owner gets, and where they are when one of them begins anew elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from wingbeat.core.errors import ConfigError, WingbeatError

if TYPE_CHECKING:
    from wingbeat.resources.remote_pool import RemotePool

logger = logging.getLogger("wingbeat.resources")

LOOK_S = 60.0
"""Between questions where the servers are, while all of them answer: there may be more of them."""
LOOK_SOON_S = 2.0
"""While one does not: it may have begun anew at another address."""
Find = Callable[[], Awaitable[Sequence[str]]]
"""The addresses of all servers now.  Raises WingbeatError where nobody can tell."""


class Servers:
    """Those that one client leases from."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        make: Callable[[str], RemotePool],
        find: Find | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``find``: None where they stay where they are.  Raises ConfigError for none."""
        if not urls:
            raise ConfigError("urls: expected the address of a resources server, got none")
        self.pools = [make(url) for url in urls]
        self._make = make
        self._find = find
        self._clock = clock
        self._looked_at = clock()
        self._lock = asyncio.Lock()
        self._owners: dict[str, RemotePool] = {}

    def of(self, owner: str) -> RemotePool:
        """An owner's server; for one that has nothing, that at which this client holds least, of those that answer."""
        pool = self._owners.get(owner) if owner else None
        if pool is None or (pool.is_away and not pool.holds(owner)):
            counts = Counter(self._owners.values())
            before = pool
            pool = min(self.pools, key=lambda pool: (pool.is_away, counts[pool], pool.num_leases))
            if before is not None and before is not pool:
                before.abandon(owner)
            if owner:
                self._owners[owner] = pool
        return pool

    def left(self, owner: str) -> None:
        """A lease of an owner ended: one that has nothing any more may go anywhere."""
        pool = self._owners.get(owner)
        if pool is not None and not pool.holds(owner) and not pool.has_fetched(owner):
            del self._owners[owner]

    def forget(self, owner: str) -> RemotePool | None:
        """The server of an owner that is over."""
        return self._owners.pop(owner, None)

    async def look(self) -> None:
        """Ask where they are now, where it is time to."""
        if self._find is None or not self._is_due:
            return
        async with self._lock:
            if not self._is_due:  # somebody else asked meanwhile
                return
            self._looked_at = self._clock()
            try:
                found = [url.rstrip("/") for url in await self._find()]
            except WingbeatError as error:
                logger.info("where the resources servers are is not known now: %s", error.message)
                return
            if found:
                await self._take(found)

    @property
    def _is_due(self) -> bool:
        every_s = LOOK_SOON_S if any(pool.is_away for pool in self.pools) else LOOK_S
        return self._clock() - self._looked_at >= every_s

    async def _take(self, found: Sequence[str]) -> None:
        """Have the new ones, and no more those that went with nothing of ours: else whoever comes next would be sent
        there, as nothing was asked of them since."""
        known = {pool.url for pool in self.pools}
        gone = [
            pool
            for pool in self.pools
            if pool.url not in found and not pool.num_leases and (pool.is_away or not pool.num_fetching)
        ]
        self.pools = [pool for pool in self.pools if pool not in gone]
        self.pools += [self._make(url) for url in dict.fromkeys(found) if url not in known]
        self._owners = {owner: pool for owner, pool in self._owners.items() if pool not in gone}
        await asyncio.gather(*(pool.close() for pool in gone))

    async def close(self) -> None:
        """Give everything back; twice is harmless."""
        await asyncio.gather(*(pool.close() for pool in self.pools))
