"""What a pool has seen, per class of resources (kind and label)."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat.resources.backend import Priced


@dataclass(slots=True)
class Timing:
    """Durations, in seconds."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds

    def copy(self) -> Timing:
        return Timing(self.count, self.total_s, self.max_s)


class Area:
    """Seconds times things, of things that come and go."""

    __slots__ = ("_ended_s", "_sum_of_begins", "count")

    def __init__(self) -> None:
        self.count = 0
        self._sum_of_begins = 0.0
        self._ended_s = 0.0

    def begin(self, now: float) -> None:
        self.count += 1
        self._sum_of_begins += now

    def end(self, since: float, now: float) -> None:
        self.count -= 1
        self._sum_of_begins -= since
        self._ended_s += now - since

    def seconds(self, now: float) -> float:
        """Until now; never less than nothing, which the rounding of large sums could say."""
        return max(0.0, self._ended_s + self.count * now - self._sum_of_begins)


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Of one class; counts are since the pool began, but for those that say "now"."""

    kind: str
    label: str
    live: int
    """Instances now, starting and closing ones too."""
    idle: int
    """Unused instances now."""
    leased: int
    """Instances in use now."""
    waiting: int
    """Asked for and not yet let in, now."""
    starts: int
    """Begun, also those that failed."""
    start_failures: int
    resets: int
    quarantined: int
    """Instances taken out of use: a reset or a check failed, or a holder found them lost."""
    leaked: int
    """Instances that could not be closed in time."""
    wait: Timing
    """Of leases for their turn."""
    start: Timing
    reset: Timing
    """With the health check after it."""
    hold: Timing
    """From one's turn until it was given back, the start of a new one included."""
    live_s: float
    """Instance seconds."""
    busy_s: float
    """Instance seconds that were somebody's, those of a start that somebody waited for included."""
    cost: float
    """Of what has a price."""

    @property
    def utilisation(self) -> float:
        """The part of its instances' lives in which they were in use; 0 before the first."""
        return self.busy_s / self.live_s if self.live_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class BudgetStats:
    """Of one budget, now."""

    name: str
    """``cpus``, ``memory_mb``, ``gpus``, ``requests_per_minute.NAME``, ``tokens_per_minute.NAME``, ``cost.NAME``."""
    capacity: float
    used: float
    """Held, spent, or drawn and not yet come back."""
    waiting: int
    """Who stands in its line."""


@dataclass(slots=True)
class Meter:
    """Counts one class."""

    kind: str
    label: str
    live: Area = field(default_factory=Area)
    busy: Area = field(default_factory=Area)
    num_starts: int = 0
    num_start_failures: int = 0
    num_resets: int = 0
    num_quarantined: int = 0
    num_leaked: int = 0
    wait: Timing = field(default_factory=Timing)
    start: Timing = field(default_factory=Timing)
    reset: Timing = field(default_factory=Timing)
    hold: Timing = field(default_factory=Timing)
    ended_cost: float = 0.0
    priced: dict[Priced, None] = field(default_factory=dict[Priced, None])
    """Instances with a price that are still there."""

    def snapshot(self, now: float, *, idle: int, waiting: int) -> ClassStats:
        return ClassStats(
            kind=self.kind,
            label=self.label,
            live=self.live.count,
            idle=idle,
            leased=self.busy.count,
            waiting=waiting,
            starts=self.num_starts,
            start_failures=self.num_start_failures,
            resets=self.num_resets,
            quarantined=self.num_quarantined,
            leaked=self.num_leaked,
            wait=self.wait.copy(),
            start=self.start.copy(),
            reset=self.reset.copy(),
            hold=self.hold.copy(),
            live_s=self.live.seconds(now),
            busy_s=self.busy.seconds(now),
            cost=self.ended_cost + sum(instance.cost for instance in self.priced),
        )
