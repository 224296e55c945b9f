"""Where a policy's trainer is, as control sees it."""

from __future__ import annotations

from enum import StrEnum


class TrainerState(StrEnum):
    """All but FROZEN come and go::

    ABSENT ──▶ REPLAYING ──▶ READY ◀──▶ TRAINING
       │           │           ▲
       └───────────┴──▶ ROLLING_BACK                any of them ──▶ ABSENT
    """

    FROZEN = "frozen"
    """There is none: the policy does not train."""
    ABSENT = "absent"
    READY = "ready"
    TRAINING = "training"
    REPLAYING = "replaying"
    """It repeats logged steps."""
    ROLLING_BACK = "rolling_back"
    """It begins a new lineage."""
