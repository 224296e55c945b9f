"""The life of one instance.

STARTING ─▶ READY ⇄ LEASED ─▶ RESETTING ─▶ READY …
    │         │       │           └─────▶ QUARANTINED ─▶ CLOSED
    │         ├───────┴──▶ QUARANTINED               (reset failed, unhealthy, lost under its holder)
    └─────────┴───────┴──▶ CLOSED

A shared one goes from LEASED straight back to READY when its last holder leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class ResourceState(Enum):
    """Where an instance stands."""

    STARTING = "starting"
    READY = "ready"
    LEASED = "leased"
    RESETTING = "resetting"
    QUARANTINED = "quarantined"
    """Never handed out again; waits to be closed."""
    CLOSED = "closed"
    """Being closed or gone."""

    targets: tuple[ResourceState, ...]
    """Its line of the table: looked up several times a lease, and members of an Enum hash slowly."""


TRANSITIONS: Mapping[ResourceState, frozenset[ResourceState]] = MappingProxyType(
    {
        ResourceState.STARTING: frozenset({ResourceState.READY, ResourceState.CLOSED}),
        ResourceState.READY: frozenset({ResourceState.LEASED, ResourceState.QUARANTINED, ResourceState.CLOSED}),
        ResourceState.LEASED: frozenset(
            {ResourceState.RESETTING, ResourceState.READY, ResourceState.QUARANTINED, ResourceState.CLOSED}
        ),
        ResourceState.RESETTING: frozenset({ResourceState.READY, ResourceState.QUARANTINED, ResourceState.CLOSED}),
        ResourceState.QUARANTINED: frozenset({ResourceState.CLOSED}),
        ResourceState.CLOSED: frozenset(),
    }
)


for _state, _targets in TRANSITIONS.items():
    _state.targets = tuple(_targets)


def advance(now: ResourceState, to: ResourceState) -> ResourceState:
    """The next state.  Raises AssertionError for a step that the table lacks: a bug of the pool."""
    assert to in now.targets, f"a {now.value} resource cannot become {to.value}"
    return to
