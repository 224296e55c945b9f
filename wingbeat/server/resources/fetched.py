"""What the clients of a resources server have fetched ahead, as it is counted."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_CALLS = 1000


@dataclass(slots=True)
class Fetched:
    """Of one owner, until it is released."""

    since: float
    asked_at: float
    """The last time."""
    count: int = 0
    """In its client's quota: no less than the pool has."""
    calls: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    """Ids of the requests, so that one that is sent again fetches nothing twice."""

    def add(self, call_id: str, count: int) -> None:
        self.count += count
        self.calls[call_id] = None
        while len(self.calls) > MAX_CALLS:
            self.calls.popitem(last=False)


@dataclass(slots=True)
class Ahead:
    """Of one client; there is one only for those who fetched something, so that inventing names costs nothing."""

    seen_at: float
    """When it last said that it lives."""
    owners: dict[str, Fetched] = field(default_factory=dict[str, Fetched])
