"""Who gets the next lease: clients that wait for work are served in turn, one lease each.

First come first served would hand a client that asks a thousand times nearly everything there is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wingbeat.core.protocol import LeaseRequest
from wingbeat.core.signals import Changed
from wingbeat.dataflow.groups import SlotTicket
from wingbeat.server.calls.fairness import FairShares
from wingbeat.server.episodes.issuing import Sources
from wingbeat.server.limits import Quota


@dataclass(slots=True, eq=False)
class Waiter:
    """One lease call."""

    request: LeaseRequest
    sources: Sources
    got: list[SlotTicket] = field(default_factory=list[SlotTicket])
    """Its own until :meth:`LeaseTurns.leave`."""
    asked_at: int = -1
    """The count of changes for which it had its turn."""

    @property
    def client(self) -> str:
        return self.request.client_id

    @property
    def is_full(self) -> bool:
        return len(self.got) >= self.request.max_leases

    @property
    def wants(self) -> object:
        """Two calls that want the same are both in vain, or neither is."""
        return (tuple(self.request.splits), self.sources, self.request.code, self.request.label)


class LeaseTurns:
    """Runs on control's event loop; every method decides at once."""

    def __init__(
        self, take: Callable[[LeaseRequest, Sources], SlotTicket | None], *, quota: Quota, changed: Changed
    ) -> None:
        """``take`` hands out one slot, or None where there is none for such a request."""
        self._take = take
        self._quota = quota
        self._changed = changed
        self._shares = FairShares()
        self._waiters: dict[Waiter, None] = {}
        self._served_at = -1

    def join(self, request: LeaseRequest, sources: Sources) -> Waiter:
        """A call begins.  Raises LimitReached where its client holds all the leases that it may."""
        self._quota.check(request.client_id)
        waiter = Waiter(request, sources)
        self._waiters[waiter] = None
        return waiter

    def serve(self, waiter: Waiter) -> None:
        """Hand out what there is: to everybody where something has changed, else to this newcomer alone.

        All wake up when something changes, and thousands may wait: the first that comes serves the others, too.
        """
        if self._served_at != self._changed.count:
            self._served_at = self._changed.count
            self._serve(list(self._waiters))
            self._serve([w for w in self._waiters if not w.got])  # a label that found no task holds nobody up any more
        elif waiter.asked_at != self._served_at:
            self._serve([waiter])

    def _serve(self, waiters: list[Waiter]) -> None:
        queues: dict[str, deque[Waiter]] = {}
        for waiter in waiters:
            waiter.asked_at = self._served_at
            queues.setdefault(waiter.client, deque()).append(waiter)
        heap = [(self._shares.place(client), number, client) for number, client in enumerate(queues)]
        heapq.heapify(heap)
        in_vain: set[object] = set()
        while heap:
            _, number, client = heap[0]
            queue = queues[client]
            while queue and (queue[0].is_full or queue[0].wants in in_vain):
                queue.popleft()
            if not queue or self._quota.room(client) < 1:
                heapq.heappop(heap)
                continue
            ticket = self._take(queue[0].request, queue[0].sources)
            if ticket is None:
                in_vain.add(queue[0].wants)
                continue
            queue[0].got.append(ticket)
            self._quota.add(client)
            self._shares.charge(client)
            heapq.heapreplace(heap, (self._shares.place(client), number, client))

    def leave(self, waiter: Waiter) -> None:
        """The call ends."""
        del self._waiters[waiter]
