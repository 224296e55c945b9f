"""The slots of open groups: their states, what may happen to them, and who holds them.

The table of transitions is drawn in :mod:`wingbeat.dataflow.groups`, which applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from wingbeat.core.errors import ConflictError
from wingbeat.core.types import NO_VARIANT, Variant
from wingbeat.dataflow.records import EpisodeRecord, GroupSpec


class SlotState(StrEnum):
    """Where one member of a group stands."""

    FREE = "free"
    LEASED = "leased"
    RUNNING = "running"
    PREPARED = "prepared"
    """Its finish counts, or not, as its transaction decides."""
    FINISHED = "finished"
    GIVEN_UP = "given_up"


class SlotEvent(StrEnum):
    """What may happen to a slot."""

    TAKE = "take"
    BEGIN = "begin"
    PREPARE = "prepare"
    FINISH = "finish"
    RELEASE = "release"
    GIVE_UP = "give_up"
    CUT_OFF = "cut_off"


TRANSITIONS: Mapping[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.TAKE): SlotState.LEASED,
    (SlotState.FREE, SlotEvent.FINISH): SlotState.FINISHED,
    (SlotState.FREE, SlotEvent.CUT_OFF): SlotState.GIVEN_UP,
    (SlotState.LEASED, SlotEvent.BEGIN): SlotState.RUNNING,
    (SlotState.LEASED, SlotEvent.FINISH): SlotState.FINISHED,
    (SlotState.LEASED, SlotEvent.RELEASE): SlotState.FREE,
    (SlotState.LEASED, SlotEvent.CUT_OFF): SlotState.GIVEN_UP,
    (SlotState.RUNNING, SlotEvent.FINISH): SlotState.FINISHED,
    (SlotState.RUNNING, SlotEvent.RELEASE): SlotState.FREE,
    (SlotState.RUNNING, SlotEvent.GIVE_UP): SlotState.GIVEN_UP,
    (SlotState.RUNNING, SlotEvent.CUT_OFF): SlotState.GIVEN_UP,
    (SlotState.GIVEN_UP, SlotEvent.FINISH): SlotState.FINISHED,
    (SlotState.FREE, SlotEvent.PREPARE): SlotState.PREPARED,
    (SlotState.LEASED, SlotEvent.PREPARE): SlotState.PREPARED,
    (SlotState.RUNNING, SlotEvent.PREPARE): SlotState.PREPARED,
    (SlotState.GIVEN_UP, SlotEvent.PREPARE): SlotState.PREPARED,
    (SlotState.PREPARED, SlotEvent.FINISH): SlotState.FINISHED,
    (SlotState.PREPARED, SlotEvent.RELEASE): SlotState.FREE,
    (SlotState.PREPARED, SlotEvent.GIVE_UP): SlotState.GIVEN_UP,
}
"""FINISH and PREPARE from FREE, LEASED and GIVEN_UP are the late finish of a lost attempt."""

TERMINAL = frozenset({SlotState.FINISHED, SlotState.GIVEN_UP})


HELD = frozenset({SlotState.LEASED, SlotState.RUNNING, SlotState.PREPARED, SlotState.FINISHED})
"""Somebody works in it, or has."""


class ReleaseReason(StrEnum):
    """Why an attempt ended without counting."""

    LOST = "lost"
    """No sign of life; a late finish may still count."""
    ABORTED = "aborted"
    FAILED = "failed"
    """It finished with an outcome other than ``agent``."""
    LEASE_EXPIRED = "lease_expired"
    """Nobody began under the lease; this uses up no attempt."""
    INTERRUPTED = "interrupted"
    """The server restarted and its client did not come back; this uses up no attempt."""


@dataclass(frozen=True, slots=True)
class SlotTicket:
    """The right to begin one attempt."""

    episode_id: str
    attempt: int
    group: GroupSpec
    variant: Variant = NO_VARIANT
    """Who may begin it."""


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slot as the ledger knows it after a restart."""

    episode_id: str
    next_attempt: int = 1
    """Above every attempt that was ever begun, so that no two share a number."""
    num_failures: int = 0
    record: EpisodeRecord | None = None
    running: int | None = None
    """The newest attempt, where it still runs (or its finish is prepared)."""
    lost: int | None = None
    """The newest attempt, where it was lost: its late finish may count."""
    variant: Variant | None = None
    """Of its newest attempt; None takes that of the record."""


@dataclass(frozen=True, slots=True)
class BookCounts:
    """A snapshot of the open groups."""

    num_groups: int
    slots: Mapping[SlotState, int]


@dataclass(slots=True)
class Slot:
    episode_id: str
    state: SlotState = SlotState.FREE
    attempt: int = 1
    begun_attempt: int = 0
    """The newest attempt that began: the only one whose finish may count.  0: none did."""
    num_failures: int = 0
    late_finish_counts: bool = False
    reason: str = "never began"
    record: EpisodeRecord | None = None
    late_from: tuple[SlotState, int] | None = None
    """Of a prepared finish that came late: where the slot stood, and the attempt that was next."""
    variant: Variant = NO_VARIANT
    """Of whoever holds it; means nothing while it is free."""
    begun_variant: Variant = NO_VARIANT
    """Of the attempt that began last."""

    def apply(self, event: SlotEvent) -> None:
        """Raises ConflictError where the slot's state does not allow the event."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise ConflictError(f"episode {self.episode_id} is {self.state}: {event} is not possible")
        self.state = target


@dataclass(slots=True)
class OpenGroup:
    spec: GroupSpec
    opened_s: float
    slots: list[Slot]
    is_recalled: bool = False
    """The version of the agent that worked in it is gone: free slots are given up."""

    @property
    def num_finished(self) -> int:
        return sum(slot.state is SlotState.FINISHED for slot in self.slots)

    @property
    def is_settled(self) -> bool:
        return all(slot.state in TERMINAL for slot in self.slots)

    @property
    def owner(self) -> Variant | None:
        """The version of the agent whose members it has; None while nobody works in it and nothing has finished."""
        return next((slot.variant for slot in self.slots if slot.state in HELD), None)
