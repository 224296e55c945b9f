"""What a pool of resources has and did, in ``POST /api/resources`` and in ``resources`` of ``GET /api/status``.

The same models carry what comes in and what is told on: counts since the pool began, and what it has now.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

MAX_CLASSES = 64
"""Of one report: a pool with more says the rest as one class, :data:`OTHER`."""
OTHER = "other"
REPORT_EVERY_S = 5.0

Count = Annotated[int, Field(ge=0, le=2**53)]
Amount = Annotated[FiniteFloat, Field(ge=0)]


class _Wire(BaseModel):
    """As :class:`wingbeat.core.protocol.Wire`, which holds these."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Durations(_Wire):
    """Seconds of something that happened ``count`` times."""

    count: Count = 0
    total_s: Amount = 0.0
    max_s: Amount = 0.0

    def plus(self, other: Durations) -> Durations:
        return Durations(
            count=self.count + other.count,
            total_s=self.total_s + other.total_s,
            max_s=max(self.max_s, other.max_s),
        )


class ResourceClass(_Wire):
    """The resources of one kind and label."""

    kind: Annotated[str, Field(min_length=1, max_length=60)]
    label: Annotated[str, Field(max_length=200)] = ""
    live: Count = 0
    """Instances now, starting and closing ones too."""
    idle: Count = 0
    """Unused instances now."""
    leased: Count = 0
    """Instances in use now."""
    waiting: Count = 0
    """Asked for and not yet let in, now."""
    starts: Count = 0
    """Begun, also those that failed."""
    start_failures: Count = 0
    resets: Count = 0
    quarantined: Count = 0
    """Instances taken out of use: a reset or a check failed, or a holder found them lost."""
    leaked: Count = 0
    """Instances that could not be closed in time."""
    wait: Durations = Durations()
    """Of leases for their turn."""
    start: Durations = Durations()
    reset: Durations = Durations()
    hold: Durations = Durations()
    live_s: Amount = 0.0
    """Instance seconds."""
    busy_s: Amount = 0.0
    """Instance seconds in use."""
    cost: Amount = 0.0
    """Of what has a price."""

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.label

    def plus(self, other: ResourceClass) -> Self:
        """Both together, under this one's name."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in (*NOW, *COUNTS)}
        times = {name: getattr(self, name).plus(getattr(other, name)) for name in TIMES}
        return self.model_copy(update={**sums, **times})


NOW = ("live", "idle", "leased", "waiting")
"""Fields that go up and down."""
COUNTS = ("starts", "start_failures", "resets", "quarantined", "leaked", "live_s", "busy_s", "cost")
"""Fields that only grow while a pool lives."""
TIMES = ("wait", "start", "reset", "hold")
"""Fields that are durations."""


class ResourceStatus(ResourceClass):
    """One class in ``resources`` of ``GET /api/status``, of all pools together."""

    pools: int = 0
    """Pools that have it now."""
    utilisation: float = 0.0
    """The share of its instances' lives in which they were in use."""
