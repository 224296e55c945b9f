"""Pots: what leases take from, each with one line of those who wait for it.

Amounts that are held and given back (processors, memory, GPUs, instances of one spec), rates that come back with
time (requests and tokens a minute), and costs that never come back.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.resources.admission import Ticket

_LAZY_LEFT = 64
"""Entries of tickets that no longer wait which a line may keep before it is swept."""


class TicketState(Enum):
    """Of one who asked."""

    WAITING = "waiting"
    LET_IN = "let_in"
    WITHDRAWN = "withdrawn"


class Pot:
    """A line, in the order of asking."""

    __slots__ = ("line", "name", "num_left")

    def __init__(self, name: str) -> None:
        self.name = name
        self.line: deque[Ticket] = deque()
        self.num_left = 0
        """Entries of tickets that were withdrawn."""

    @property
    def first(self) -> Ticket | None:
        """Who is next."""
        line = self.line
        while line:
            if line[0].state is TicketState.WAITING:
                return line[0]
            line.popleft()
            self.num_left -= 1
        return None

    def leave(self) -> None:
        """One in the line was withdrawn."""
        self.num_left += 1
        if self.num_left > _LAZY_LEFT + len(self.line) // 2:
            self.line = deque(ticket for ticket in self.line if ticket.state is TicketState.WAITING)
            self.num_left = 0


class AmountPot(Pot):
    """Whole units (thousandths of a processor, MiB, instances) that are held and given back."""

    __slots__ = ("capacity", "free", "returning", "unit")

    def __init__(self, name: str, capacity: int, *, unit: float = 1) -> None:
        super().__init__(name)
        self.capacity = capacity
        self.free = capacity
        self.returning = 0
        """Held by instances that were told to go."""
        self.unit = unit
        """What one unit is to people."""


class RatePot(Pot):
    """So much a minute: holds a minute's worth at most, and fills steadily."""

    __slots__ = ("_at", "_level", "capacity")

    def __init__(self, name: str, per_minute: float, now: float) -> None:
        super().__init__(name)
        self.capacity = per_minute
        self._level = per_minute
        self._at = now

    def has(self, amount: float, now: float) -> bool:
        """Whether so much is there now."""
        return self.level(now) >= amount - 1e-9 * self.capacity

    def take(self, amount: float, now: float) -> None:
        """Negative amounts are given back."""
        self._level = min(self.capacity, self.level(now) - amount)
        self._at = now

    def level(self, now: float) -> float:
        """Below 0 where more was used than had been said."""
        return min(self.capacity, self._level + max(0.0, now - self._at) * self.capacity / 60)

    def ready_at(self, amount: float, now: float) -> float:
        """When so much will be there, if nobody takes more."""
        return now + max(0.0, amount - self.level(now)) * 60 / self.capacity


class CostPot(Pot):
    """Money: what is spent is spent."""

    __slots__ = ("capacity", "spent")

    def __init__(self, name: str, capacity: float) -> None:
        super().__init__(name)
        self.capacity = capacity
        self.spent = 0.0

    def has(self, amount: float, now: float) -> bool:
        return self.spent + amount <= self.capacity and self.spent < self.capacity

    def take(self, amount: float, now: float) -> None:
        self.spent += amount


DrawPot = RatePot | CostPot
"""What leases draw from and do not give back."""
