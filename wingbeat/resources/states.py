"""The life of one resource.

STARTING ─▶ READY ─▶ LEASED ─▶ RESETTING ─▶ READY …
    │         │         │          └──────▶ QUARANTINED ─▶ CLOSED
    └─────────┴─────────┴──▶ CLOSED                 (reset failed, unhealthy)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class ResourceState(Enum):
    """Where a resource stands."""

    STARTING = "starting"
    READY = "ready"
    LEASED = "leased"
    RESETTING = "resetting"
    QUARANTINED = "quarantined"
    """Never handed out again; waits to be closed."""
    CLOSED = "closed"


TRANSITIONS: Mapping[ResourceState, frozenset[ResourceState]] = MappingProxyType(
    {
        ResourceState.STARTING: frozenset({ResourceState.READY, ResourceState.CLOSED}),
        ResourceState.READY: frozenset({ResourceState.LEASED, ResourceState.CLOSED}),
        ResourceState.LEASED: frozenset({ResourceState.RESETTING, ResourceState.CLOSED}),
        ResourceState.RESETTING: frozenset({ResourceState.READY, ResourceState.QUARANTINED}),
        ResourceState.QUARANTINED: frozenset({ResourceState.CLOSED}),
        ResourceState.CLOSED: frozenset(),
    }
)


def advance(now: ResourceState, to: ResourceState) -> ResourceState:
    """The next state.  Raises AssertionError for a step that the table lacks: a bug of the pool."""
    assert to in TRANSITIONS[now], f"a {now.value} resource cannot become {to.value}"
    return to
