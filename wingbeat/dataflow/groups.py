"""Which episodes belong together, and which of them may still run.

A group reserves all its slots at once, so a member of an admitted group is never refused.  A slot
keeps its episode id while attempts come and go; exactly one attempt ever counts::

    FREE ──take──▶ LEASED ──begin──▶ RUNNING ──finish──▶ FINISHED
     ▲               │                  │ ╲
     └───release─────┴─────release──────┘  ╲──give up──▶ GIVEN_UP      (cut off: any open slot ──▶ GIVEN_UP)
                                        RUNNING ──prepare──▶ PREPARED ──finish──▶ FINISHED, or as if aborted

A prepared finish waits for the decision of its transaction: its group neither closes nor drops it meanwhile.

A client that was taken for lost may still be right: its late finish counts until a successor attempt
has begun.  The book holds open groups only and does no I/O; the ledger remembers the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from wingbeat.core.errors import ConflictError, EpisodeClosed, NotFoundError
from wingbeat.core.ports import Clock
from wingbeat.core.types import NO_VARIANT, Split, Variant
from wingbeat.dataflow.aging import rebase_member
from wingbeat.dataflow.operators import counts_in_group
from wingbeat.dataflow.records import ClosedGroup, EpisodeRecord, GroupSpec, MissingMember
from wingbeat.dataflow.slots import (
    TERMINAL,
    TRANSITIONS,
    BookCounts,
    OpenGroup,
    ReleaseReason,
    RestoredSlot,
    Slot,
    SlotEvent,
    SlotState,
    SlotTicket,
)

__all__ = [
    "TRANSITIONS",
    "BookCounts",
    "GroupBook",
    "ReleaseReason",
    "RestoredSlot",
    "SlotEvent",
    "SlotState",
    "SlotTicket",
]


class GroupBook:
    """All open groups and the state of their slots."""

    def __init__(
        self,
        *,
        max_attempts: int,
        group_floor: int | None,
        group_deadline_s: float,
        clock: Clock,
        mixes_variants: bool = False,
    ) -> None:
        """``group_floor`` None means the group's size: such groups never close early.  ``mixes_variants`` lets
        different versions of an agent work in one group."""
        if max_attempts < 1:
            raise ValueError(f"max_attempts: expected at least 1, got {max_attempts}")
        self._max_attempts = max_attempts
        self._group_floor = group_floor
        self._group_deadline_s = group_deadline_s
        self._clock = clock
        self._mixes_variants = mixes_variants
        self._groups: dict[str, OpenGroup] = {}
        self._slots: dict[str, tuple[OpenGroup, Slot]] = {}

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
        group = OpenGroup(spec, self._clock(), [self._restored(slot) for slot in slots])
        self._groups[spec.id] = group
        self._slots.update({slot.episode_id: (group, slot) for slot in group.slots})

    def _restored(self, slot: RestoredSlot) -> Slot:
        restored = Slot(slot.episode_id, attempt=slot.next_attempt, num_failures=slot.num_failures)
        if slot.record is not None:
            restored.attempt = restored.begun_attempt = slot.record.attempt
            restored.record = slot.record
            restored.variant = slot.variant or Variant(slot.record.label, slot.record.code)
            restored.begun_variant = restored.variant
            restored.state = SlotState.FINISHED
        elif slot.running is not None:
            restored.attempt = restored.begun_attempt = slot.running
            restored.variant = restored.begun_variant = slot.variant or NO_VARIANT
            restored.state = SlotState.RUNNING
        elif slot.num_failures >= self._max_attempts:
            restored.attempt -= 1
            restored.state = SlotState.GIVEN_UP
            restored.reason = ReleaseReason.FAILED
        if slot.lost is not None and slot.record is None:
            restored.begun_attempt, restored.late_finish_counts = slot.lost, True
            restored.begun_variant, restored.reason = slot.variant or NO_VARIANT, ReleaseReason.LOST
        return restored

    def take(self, group_id: str, variant: Variant = NO_VARIANT) -> SlotTicket:
        """Lease the group's first free slot to a version of the agent, the same for all members of a group.

        Raises NotFoundError, or ConflictError where no slot is free for it.
        """
        group = self._groups.get(group_id)
        if group is None:
            raise NotFoundError(f"no open group {group_id!r}; it has closed or never was")
        slot = next((s for s in group.slots if s.state is SlotState.FREE), None)
        if slot is None:
            raise ConflictError(f"group {group_id} has no free slot: all {group.spec.size} are taken")
        if not self._admits(group, variant):
            raise ConflictError(
                f"group {group_id} belongs to the agent version {group.owner}, got {variant}: use another group id, or"
                " set dataflow.mix_agent_versions",
                param="group",
            )
        slot.apply(SlotEvent.TAKE)
        slot.variant = variant
        return SlotTicket(slot.episode_id, slot.attempt, group.spec, variant)

    def _admits(self, group: OpenGroup, variant: Variant) -> bool:
        return not group.is_recalled and (self._mixes_variants or group.owner in (None, variant))

    def owner(self, group_id: str) -> Variant | None:
        """The version of the agent whose members an open group has; None for none so far."""
        group = self._groups.get(group_id)
        return None if group is None else group.owner

    def recall(self, group_id: str) -> bool:
        """The version of the agent that works in a group takes no more of its slots: give the free ones up.

        What runs may still finish.  False where there was nothing to give up.
        """
        group = self._groups.get(group_id)
        free = [] if group is None else [slot for slot in group.slots if slot.state is SlotState.FREE]
        if group is None or not free:
            return False
        group.is_recalled = True
        for slot in free:
            slot.apply(SlotEvent.CUT_OFF)
            slot.reason = "no client with its group's version of the agent was left"
        return True

    def is_recalled(self, group_id: str) -> bool:
        """Slots that come free in such a group must be given up, too: nobody may take them."""
        return group_id in self._groups and self._groups[group_id].is_recalled

    def begin(self, episode_id: str, attempt: int) -> None:
        """A leased attempt starts; from now on no earlier attempt can count."""
        slot = self._slot(episode_id)[1]
        if attempt != slot.attempt:
            raise ConflictError(
                f"episode {episode_id}: attempt {attempt} was released; attempt {slot.attempt} is current, lease again"
            )
        slot.apply(SlotEvent.BEGIN)
        slot.begun_attempt, slot.begun_variant = attempt, slot.variant
        slot.late_finish_counts = False

    def finish(self, episode_id: str, attempt: int, record: EpisodeRecord) -> SlotState:
        """Settle an attempt; returns the slot's new state.

        Only ``agent`` outcomes become members: any other reopens the slot (or gives it up).  The
        finish of an attempt that was released as lost counts until its successor has begun.
        Raises EpisodeClosed where the group has closed or the attempt had ended otherwise, and
        ConflictError where it never began or a successor has.
        """
        slot, is_late = self._check_finish(episode_id, attempt, record)
        if counts_in_group(record):
            slot.apply(SlotEvent.FINISH)
            slot.attempt, slot.record, slot.reason = attempt, record, "finished"
            slot.variant = slot.begun_variant
        elif is_late:
            slot.late_finish_counts = False
        else:
            self._release(slot, ReleaseReason.FAILED)
        return slot.state

    def prepare(self, episode_id: str, attempt: int, record: EpisodeRecord) -> None:
        """Hold an ``agent`` finish until its transaction is decided: :meth:`finish` or :meth:`undo` follows.

        Raises as :meth:`finish`.
        """
        slot, is_late = self._check_finish(episode_id, attempt, record)
        if slot.state is SlotState.PREPARED:
            raise ConflictError(f"episode {episode_id} attempt {attempt} is prepared already")
        slot.late_from = (slot.state, slot.attempt) if is_late else None
        slot.apply(SlotEvent.PREPARE)
        slot.attempt, slot.record = attempt, record
        slot.variant = slot.begun_variant

    def undo(self, episode_id: str, attempt: int) -> SlotState:
        """The transaction of a prepared finish was aborted: the slot reopens, as after an abort.

        One whose attempt had been lost before goes back to where it stood; that attempt used up its try then.
        Raises ConflictError where the attempt is not prepared.
        """
        slot = self._slot(episode_id)[1]
        if slot.state is not SlotState.PREPARED or attempt != slot.attempt:
            raise ConflictError(f"episode {episode_id} attempt {attempt} is not prepared: the slot is {slot.state}")
        slot.record = None
        if slot.late_from is None:
            self._release(slot, ReleaseReason.ABORTED)
            return slot.state
        stood, next_attempt = slot.late_from
        slot.late_from, slot.late_finish_counts, slot.reason = None, False, ReleaseReason.ABORTED
        gives_up = stood is SlotState.GIVEN_UP
        slot.apply(SlotEvent.GIVE_UP if gives_up else SlotEvent.RELEASE)
        # above the attempt of a lease that somebody may still hold
        slot.attempt = next_attempt if gives_up else next_attempt + 1
        return slot.state

    def prepared_record(self, episode_id: str) -> EpisodeRecord:
        """What a prepared finish would count with.  Raises ConflictError where none is prepared."""
        slot = self._slot(episode_id)[1]
        if slot.state is not SlotState.PREPARED or slot.record is None:
            raise ConflictError(f"episode {episode_id} is not prepared: the slot is {slot.state}")
        return slot.record

    def _check_finish(self, episode_id: str, attempt: int, record: EpisodeRecord) -> tuple[Slot, bool]:
        """The slot of an attempt that may finish, and whether it comes late."""
        group, slot = self._slot(episode_id)
        if (record.episode_id, record.attempt) != (episode_id, attempt):
            raise ValueError(f"expected the record of {episode_id} attempt {attempt}, got {record.episode_id}")
        if attempt != slot.begun_attempt:
            happened = "a successor attempt has begun" if attempt < slot.begun_attempt else "it never began"
            raise ConflictError(f"episode {episode_id} attempt {attempt} cannot finish: {happened}")
        is_late = slot.state not in (SlotState.RUNNING, SlotState.PREPARED)
        if slot.state is SlotState.FINISHED or (is_late and not slot.late_finish_counts):
            raise EpisodeClosed(f"episode {episode_id} attempt {attempt} has ended already ({slot.reason})")
        if is_late and not self._mixes_variants and group.owner not in (None, slot.begun_variant):
            raise EpisodeClosed(
                f"episode {episode_id} attempt {attempt} comes too late: its group went to the agent version"
                f" {group.owner}"
            )
        return slot, is_late

    def release(self, episode_id: str, attempt: int, reason: ReleaseReason) -> SlotState:
        """End a leased or running attempt that does not count: its slot reopens, or is given up.

        The next ticket of the slot has a higher attempt.  ``max_attempts`` counts attempts that began.
        Raises ConflictError where the attempt is not the current one or not in progress.
        """
        slot = self._slot(episode_id)[1]
        if attempt != slot.attempt:
            raise ConflictError(f"episode {episode_id}: attempt {slot.attempt} is current, not {attempt}")
        if slot.state is SlotState.PREPARED:
            raise ConflictError(f"episode {episode_id} attempt {attempt} is prepared: only its transaction ends it")
        self._release(slot, reason)
        return slot.state

    def _release(self, slot: Slot, reason: ReleaseReason) -> None:
        has_begun = slot.state in (SlotState.RUNNING, SlotState.PREPARED) and reason is not ReleaseReason.INTERRUPTED
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
        if any(slot.state in (SlotState.LEASED, SlotState.RUNNING, SlotState.PREPARED) for slot in group.slots):
            return False
        for slot in group.slots:
            if slot.state is SlotState.FREE:
                slot.apply(SlotEvent.CUT_OFF)
                slot.reason = "its client never came back"
        return True

    def groups_with_free_slots(self, variant: Variant | None = None) -> tuple[GroupSpec, ...]:
        """Oldest first, so that groups complete before others start: all, or those that admit one version."""
        return tuple(
            group.spec
            for group in self._groups.values()
            if any(slot.state is SlotState.FREE for slot in group.slots)
            and (variant is None or self._admits(group, variant))
        )

    def closed(self) -> tuple[ClosedGroup, ...]:
        """Drain the groups that are complete: they leave the book and their episodes become unknown to it.

        Complete is a group whose slots are all finished or given up, or a training group past its
        deadline with at least the floor.  Evaluation groups are never cut: that would drop the long
        episodes and flatter the score.
        """
        complete = [group for group in self._groups.values() if group.is_settled or self._may_cut(group)]
        return tuple(self._close(group) for group in complete)

    def _may_cut(self, group: OpenGroup) -> bool:
        if group.spec.split is not Split.TRAIN or self._clock() - group.opened_s < self._group_deadline_s:
            return False
        if any(slot.state is SlotState.PREPARED for slot in group.slots):
            return False
        floor = group.spec.size if self._group_floor is None else min(self._group_floor, group.spec.size)
        return group.num_finished >= floor

    def _close(self, group: OpenGroup) -> ClosedGroup:
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
        too_few = group.is_recalled and len(finished) < self._recall_floor(group)
        return ClosedGroup(
            group.spec, finished=finished, given_up=given_up, cut_off=tuple(cut_off), is_recalled=too_few
        )

    def _recall_floor(self, group: OpenGroup) -> int:
        """Members with which a group counts whose version of the agent has left: half of it where nothing is set."""
        return min(self._group_floor or (group.spec.size + 1) // 2, group.spec.size)

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

    def _slot(self, episode_id: str) -> tuple[OpenGroup, Slot]:
        entry = self._slots.get(episode_id)
        if entry is None:
            raise EpisodeClosed(
                f"episode {episode_id} belongs to no open group: the group has closed, or the id is wrong"
            )
        return entry


def _rebased(record: EpisodeRecord, policy: str, highest: int) -> EpisodeRecord:
    samples = tuple(rebase_member(s, highest=highest) if s.policy == policy else s for s in record.samples)
    return replace(record, samples=samples)


def _missing(slot: Slot, reason: str) -> MissingMember:
    return MissingMember(slot.episode_id, slot.attempt, reason)
