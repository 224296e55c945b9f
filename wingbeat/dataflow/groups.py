"""Which episodes belong together, and which of them may still run.

A group reserves all its slots at once, so a member of an admitted group is never refused.  A slot
keeps its episode id while attempts come and go; exactly one attempt ever counts::

    FREE ──take──▶ LEASED ──begin──▶ RUNNING ──finish──▶ FINISHED
     ▲               │                  │ ╲
     └───release─────┴─────release──────┘  ╲──give up──▶ GIVEN_UP      (cut off: any open slot ──▶ GIVEN_UP)

A client that was taken for lost may still be right: its late finish counts until a successor attempt
has begun.  The book holds open groups only and does no I/O; the ledger remembers the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from wingbeat.core.errors import ConflictError, EpisodeClosed, NotFoundError
from wingbeat.core.ports import Clock
from wingbeat.core.types import Split
from wingbeat.dataflow.aging import rebase_member
from wingbeat.dataflow.operators import counts_in_group
from wingbeat.dataflow.records import ClosedGroup, EpisodeRecord, GroupSpec, MissingMember


class SlotState(StrEnum):
    """Where one member of a group stands."""

    FREE = "free"
    LEASED = "leased"
    RUNNING = "running"
    FINISHED = "finished"
    GIVEN_UP = "given_up"


class SlotEvent(StrEnum):
    """What may happen to a slot."""

    TAKE = "take"
    BEGIN = "begin"
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
}
"""FINISH from FREE, LEASED and GIVEN_UP is the late finish of a lost attempt."""

TERMINAL = frozenset({SlotState.FINISHED, SlotState.GIVEN_UP})


class ReleaseReason(StrEnum):
    """Why an attempt ended without counting."""

    LOST = "lost"
    """No sign of life; a late finish may still count."""
    ABORTED = "aborted"
    FAILED = "failed"
    """It finished with an outcome other than ``agent``."""
    LEASE_EXPIRED = "lease_expired"
    """Nobody began under the lease; this uses up no attempt."""


@dataclass(frozen=True, slots=True)
class SlotTicket:
    """The right to begin one attempt."""

    episode_id: str
    attempt: int
    group: GroupSpec


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slot as the ledger knows it after a restart."""

    episode_id: str
    next_attempt: int = 1
    """Above every attempt that was ever begun, so that no two share a number."""
    num_failures: int = 0
    record: EpisodeRecord | None = None


@dataclass(frozen=True, slots=True)
class BookCounts:
    """A snapshot of the open groups."""

    num_groups: int
    slots: Mapping[SlotState, int]


@dataclass(slots=True)
class _Slot:
    episode_id: str
    state: SlotState = SlotState.FREE
    attempt: int = 1
    begun_attempt: int = 0
    """The newest attempt that began: the only one whose finish may count.  0: none did."""
    num_failures: int = 0
    late_finish_counts: bool = False
    reason: str = "never began"
    record: EpisodeRecord | None = None

    def apply(self, event: SlotEvent) -> None:
        """Raises ConflictError where the slot's state does not allow the event."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise ConflictError(f"episode {self.episode_id} is {self.state}: {event} is not possible")
        self.state = target


@dataclass(slots=True)
class _OpenGroup:
    spec: GroupSpec
    opened_s: float
    slots: list[_Slot]

    @property
    def num_finished(self) -> int:
        return sum(slot.state is SlotState.FINISHED for slot in self.slots)

    @property
    def is_settled(self) -> bool:
        return all(slot.state in TERMINAL for slot in self.slots)


class GroupBook:
    """All open groups and the state of their slots."""

    def __init__(self, *, max_attempts: int, group_floor: int | None, group_deadline_s: float, clock: Clock) -> None:
        """``group_floor`` None means the group's size: such groups never close early."""
        if max_attempts < 1:
            raise ValueError(f"max_attempts: expected at least 1, got {max_attempts}")
        self._max_attempts = max_attempts
        self._group_floor = group_floor
        self._group_deadline_s = group_deadline_s
        self._clock = clock
        self._groups: dict[str, _OpenGroup] = {}
        self._slots: dict[str, tuple[_OpenGroup, _Slot]] = {}

    def open_group(self, spec: GroupSpec, *, episode_ids: Sequence[str] | None = None) -> tuple[str, ...]:
        """Reserve all slots of a group; returns their episode ids (by default ``<group id>-<index>``)."""
        ids = tuple(f"{spec.id}-{i}" for i in range(spec.size)) if episode_ids is None else tuple(episode_ids)
        self.restore(spec, slots=[RestoredSlot(episode_id) for episode_id in ids])
        return ids

    def restore(self, spec: GroupSpec, *, slots: Sequence[RestoredSlot]) -> None:
        """Re-open a group after a restart; what ran then has lost its server and runs anew.

        The deadline starts anew, too.  Raises ConflictError where ids are in use already, ValueError
        where the number of slots is not the group's size.
        """
        if spec.size < 1 or len(slots) != spec.size:
            raise ValueError(f"group {spec.id}: expected {spec.size} >= 1 slots, got {len(slots)}")
        if spec.id in self._groups:
            raise ConflictError(f"group {spec.id} is open already; give every group its own id")
        ids = [slot.episode_id for slot in slots]
        if len(set(ids)) < len(ids) or any(episode_id in self._slots for episode_id in ids):
            raise ConflictError(f"group {spec.id}: episode ids must be unique, got {ids}")
        group = _OpenGroup(spec, self._clock(), [self._restored(slot) for slot in slots])
        self._groups[spec.id] = group
        self._slots.update({slot.episode_id: (group, slot) for slot in group.slots})

    def _restored(self, slot: RestoredSlot) -> _Slot:
        restored = _Slot(slot.episode_id, attempt=slot.next_attempt, num_failures=slot.num_failures)
        if slot.record is not None:
            restored.attempt = restored.begun_attempt = slot.record.attempt
            restored.record = slot.record
            restored.state = SlotState.FINISHED
        elif slot.num_failures >= self._max_attempts:
            restored.attempt -= 1
            restored.state = SlotState.GIVEN_UP
            restored.reason = ReleaseReason.FAILED
        return restored

    def take(self, group_id: str) -> SlotTicket:
        """Lease the group's first free slot.  Raises NotFoundError, or ConflictError where none is free."""
        group = self._groups.get(group_id)
        if group is None:
            raise NotFoundError(f"no open group {group_id!r}; it has closed or never was")
        slot = next((s for s in group.slots if s.state is SlotState.FREE), None)
        if slot is None:
            raise ConflictError(f"group {group_id} has no free slot: all {group.spec.size} are taken")
        slot.apply(SlotEvent.TAKE)
        return SlotTicket(slot.episode_id, slot.attempt, group.spec)

    def begin(self, episode_id: str, attempt: int) -> None:
        """A leased attempt starts; from now on no earlier attempt can count."""
        slot = self._slot(episode_id)[1]
        if attempt != slot.attempt:
            raise ConflictError(
                f"episode {episode_id}: attempt {attempt} was released; attempt {slot.attempt} is current, lease again"
            )
        slot.apply(SlotEvent.BEGIN)
        slot.begun_attempt = attempt
        slot.late_finish_counts = False

    def finish(self, episode_id: str, attempt: int, record: EpisodeRecord) -> SlotState:
        """Settle an attempt; returns the slot's new state.

        Only ``agent`` outcomes become members: any other reopens the slot (or gives it up).  The
        finish of an attempt that was released as lost counts until its successor has begun.
        Raises EpisodeClosed where the group has closed or the attempt had ended otherwise, and
        ConflictError where it never began or a successor has.
        """
        slot = self._slot(episode_id)[1]
        if (record.episode_id, record.attempt) != (episode_id, attempt):
            raise ValueError(f"expected the record of {episode_id} attempt {attempt}, got {record.episode_id}")
        if attempt != slot.begun_attempt:
            happened = "a successor attempt has begun" if attempt < slot.begun_attempt else "it never began"
            raise ConflictError(f"episode {episode_id} attempt {attempt} cannot finish: {happened}")
        is_late = slot.state is not SlotState.RUNNING
        if slot.state is SlotState.FINISHED or (is_late and not slot.late_finish_counts):
            raise EpisodeClosed(f"episode {episode_id} attempt {attempt} has ended already ({slot.reason})")
        if counts_in_group(record):
            slot.apply(SlotEvent.FINISH)
            slot.attempt, slot.record, slot.reason = attempt, record, "finished"
        elif is_late:
            slot.late_finish_counts = False
        else:
            self._release(slot, ReleaseReason.FAILED)
        return slot.state

    def release(self, episode_id: str, attempt: int, reason: ReleaseReason) -> SlotState:
        """End a leased or running attempt that does not count: its slot reopens, or is given up.

        The next ticket of the slot has a higher attempt.  ``max_attempts`` counts attempts that began.
        Raises ConflictError where the attempt is not the current one or not in progress.
        """
        slot = self._slot(episode_id)[1]
        if attempt != slot.attempt:
            raise ConflictError(f"episode {episode_id}: attempt {slot.attempt} is current, not {attempt}")
        self._release(slot, reason)
        return slot.state

    def _release(self, slot: _Slot, reason: ReleaseReason) -> None:
        has_begun = slot.state is SlotState.RUNNING
        is_last = has_begun and slot.num_failures + 1 >= self._max_attempts
        slot.apply(SlotEvent.GIVE_UP if is_last else SlotEvent.RELEASE)
        slot.reason = reason
        if has_begun:
            slot.num_failures += 1
            slot.late_finish_counts = reason is ReleaseReason.LOST
        if not is_last:
            slot.attempt += 1

    def abandon(self, group_id: str) -> bool:
        """Give up the free slots of a group past its deadline in which nobody works; True if that was so.

        For groups whose slots only their own client may take: if it never comes back, what it finished
        still counts, and admission gets the room back.
        """
        group = self._groups.get(group_id)
        if group is None or self._clock() - group.opened_s < self._group_deadline_s:
            return False
        if any(slot.state in (SlotState.LEASED, SlotState.RUNNING) for slot in group.slots):
            return False
        for slot in group.slots:
            if slot.state is SlotState.FREE:
                slot.apply(SlotEvent.CUT_OFF)
                slot.reason = "its client never came back"
        return True

    def groups_with_free_slots(self) -> tuple[GroupSpec, ...]:
        """Oldest first, so that groups complete before others start."""
        return tuple(
            group.spec for group in self._groups.values() if any(slot.state is SlotState.FREE for slot in group.slots)
        )

    def closed(self) -> tuple[ClosedGroup, ...]:
        """Drain the groups that are complete: they leave the book and their episodes become unknown to it.

        Complete is a group whose slots are all finished or given up, or a training group past its
        deadline with at least the floor.  Evaluation groups are never cut: that would drop the long
        episodes and flatter the score.
        """
        complete = [group for group in self._groups.values() if group.is_settled or self._may_cut(group)]
        return tuple(self._close(group) for group in complete)

    def _may_cut(self, group: _OpenGroup) -> bool:
        if group.spec.split is not Split.TRAIN or self._clock() - group.opened_s < self._group_deadline_s:
            return False
        floor = group.spec.size if self._group_floor is None else min(self._group_floor, group.spec.size)
        return group.num_finished >= floor

    def _close(self, group: _OpenGroup) -> ClosedGroup:
        given_up = tuple(_missing(s, s.reason) for s in group.slots if s.state is SlotState.GIVEN_UP)
        cut_off: list[MissingMember] = []
        for slot in group.slots:
            if slot.state not in TERMINAL:
                cut_off.append(_missing(slot, f"{slot.state} at the deadline"))
                slot.apply(SlotEvent.CUT_OFF)
        finished = tuple(slot.record for slot in group.slots if slot.record is not None)
        del self._groups[group.spec.id]
        for slot in group.slots:
            del self._slots[slot.episode_id]
        return ClosedGroup(group.spec, finished=finished, given_up=given_up, cut_off=tuple(cut_off))

    def rebase(self, policy: str, *, highest: int) -> None:
        """A policy was rolled back: floors and finished members are not newer than ``highest``."""
        for group in self._groups.values():
            floor = group.spec.floor_version.get(policy)
            if floor is not None and floor > highest:
                group.spec = replace(group.spec, floor_version={**group.spec.floor_version, policy: highest})
            for slot in group.slots:
                if slot.record is not None:
                    slot.record = _rebased(slot.record, policy, highest)

    def floors(self, policy: str) -> list[int]:
        """Floor versions of the open training groups of a policy, for the staleness gate."""
        return [
            group.spec.floor_version[policy]
            for group in self._groups.values()
            if group.spec.split is Split.TRAIN and policy in group.spec.floor_version
        ]

    def progress(self) -> tuple[tuple[GroupSpec, int], ...]:
        """Open groups, oldest first, each with its number of finished members (for status)."""
        return tuple((group.spec, group.num_finished) for group in self._groups.values())

    def state_of(self, episode_id: str) -> tuple[SlotState, int]:
        """State and current attempt of an episode of an open group; raises EpisodeClosed otherwise."""
        slot = self._slot(episode_id)[1]
        return slot.state, slot.attempt

    def counts(self, split: Split | None = None) -> BookCounts:
        """Open groups and their slots by state, of one split or of both."""
        groups = [g for g in self._groups.values() if split is None or g.spec.split is split]
        found = Counter(slot.state for group in groups for slot in group.slots)
        return BookCounts(num_groups=len(groups), slots={state: found[state] for state in SlotState})

    def _slot(self, episode_id: str) -> tuple[_OpenGroup, _Slot]:
        entry = self._slots.get(episode_id)
        if entry is None:
            raise EpisodeClosed(
                f"episode {episode_id} belongs to no open group: the group has closed, or the id is wrong"
            )
        return entry


def _rebased(record: EpisodeRecord, policy: str, highest: int) -> EpisodeRecord:
    samples = tuple(rebase_member(s, highest=highest) if s.policy == policy else s for s in record.samples)
    return replace(record, samples=samples)


def _missing(slot: _Slot, reason: str) -> MissingMember:
    return MissingMember(slot.episode_id, slot.attempt, reason)
