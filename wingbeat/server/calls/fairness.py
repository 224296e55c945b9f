"""Fair queueing: who is served next, so that a client with much to do takes only its share.

Start-time fair queueing (Goyal, Vin, Cheng 1996): serving a client moves its own clock on by what the service cost,
and the one whose clock is furthest behind is next.  The clock of a client that comes (back) starts where the others
stand: having been away earns nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

FORGET_ABOVE = 1024
"""Of more clients than this the clocks that are ahead least are let go: those lose little of what they owe."""


class FairShares:
    """The clocks of clients.  Does not know what is served."""

    def __init__(self) -> None:
        self._now = 0.0
        self._clocks: dict[str, float] = {}

    def place(self, client: str) -> float:
        """Where a client stands: the lowest is served next."""
        return max(self._now, self._clocks.get(client, 0.0))

    def charge(self, client: str, cost: float = 1.0) -> None:
        """The client was served."""
        place = self.place(client)
        self._now = place
        self._clocks[client] = place + cost
        if len(self._clocks) > FORGET_ABOVE:
            ahead = [(clock, name) for name, clock in self._clocks.items() if clock > place]
            self._clocks = {name: clock for clock, name in heapq.nlargest(FORGET_ABOVE // 2, ahead)}


class FairQueue(Generic[T]):
    """Items of many clients, first come first served within each."""

    def __init__(self) -> None:
        self._shares = FairShares()
        self._returned: deque[tuple[str, T]] = deque()
        """Items that were served, and came back."""
        self._items: dict[str, deque[tuple[T, float]]] = {}
        self._heap: list[tuple[float, int, str]] = []
        """(place, order of arrival, client), once for every client with items."""
        self._arrivals = itertools.count()
        self._num_items = 0

    def push(self, client: str, item: T, *, cost: float) -> None:
        own = self._items.get(client)
        if own is None:
            own = self._items[client] = deque()
            heapq.heappush(self._heap, (self._shares.place(client), next(self._arrivals), client))
        own.append((item, cost))
        self._num_items += 1

    def push_back(self, client: str, item: T) -> None:
        """An item that had its turn and lost what it got: it is next again, before everything else."""
        self._returned.appendleft((client, item))
        self._num_items += 1

    def peek(self) -> T | None:
        """The item that :meth:`pop` would take; None where there is none."""
        if self._returned:
            return self._returned[0][1]
        self._skip_emptied()
        return self._items[self._heap[0][2]][0][0] if self._heap else None

    def pop(self) -> T:
        """Raises IndexError where there is none."""
        if self._returned:
            self._num_items -= 1
            return self._returned.popleft()[1]
        self._skip_emptied()
        client = heapq.heappop(self._heap)[2]
        own = self._items[client]
        item, cost = own.popleft()
        self._num_items -= 1
        self._shares.charge(client, cost)
        if own:
            heapq.heappush(self._heap, (self._shares.place(client), next(self._arrivals), client))
        else:
            del self._items[client]
        return item

    def _skip_emptied(self) -> None:
        """Clients all of whose items were removed."""
        while self._heap and not self._items[self._heap[0][2]]:
            del self._items[heapq.heappop(self._heap)[2]]

    def remove(self, client: str, item: T) -> bool:
        """Take an item out unserved; False where it is not here."""
        own = self._items.get(client, deque())
        for position, (held, _) in enumerate(own):
            if held is item:
                del own[position]
                self._num_items -= 1
                return True
        for position, (_, held) in enumerate(self._returned):
            if held is item:
                del self._returned[position]
                self._num_items -= 1
                return True
        return False

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        yield from (item for _, item in self._returned)
        yield from (item for own in self._items.values() for item, _ in own)
