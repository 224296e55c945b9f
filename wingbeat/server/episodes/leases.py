"""Slots that were handed out and not begun yet.

A lease call whose answer is lost is sent again under the same idempotency key, and gets the same leases: else their
slots would be nobody's until they lapse, and the client would hold others besides.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wingbeat.core.protocol import GroupModel, Lease
from wingbeat.dataflow.groups import SlotTicket
from wingbeat.server.episodes.begins import Caller
from wingbeat.server.episodes.registry import task_model
from wingbeat.server.limits import Quota


@dataclass(frozen=True, slots=True)
class PendingLease:
    """One of them."""

    id: str
    ticket: SlotTicket
    expires: float
    """Monotonic."""
    caller: Caller
    """Who leased it."""
    request: tuple[str, str] | None
    """Client and idempotency key of the call that it answered, where that had one."""


class Leases:
    """Runs on control's event loop; each holds a place in its client's quota, which whoever hands it out has taken."""

    def __init__(self, quota: Quota, *, lease_s: float, clock: Callable[[], float]) -> None:
        self._quota = quota
        self._lease_s = lease_s
        self._clock = clock
        self._pending: dict[str, PendingLease] = {}
        self._answers: dict[tuple[str, str], list[str]] = {}
        """Leases by the call that they answered."""

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingLease]:
        return iter(tuple(self._pending.values()))

    def add(self, ticket: SlotTicket, caller: Caller, *, idempotency_key: str | None = None) -> Lease:
        """A ticket is handed out."""
        request = None if idempotency_key is None else (caller.client, idempotency_key)
        expires = self._clock() + self._lease_s
        lease = PendingLease(f"lease-{secrets.token_hex(8)}", ticket, expires, caller, request)
        self._pending[lease.id] = lease
        if request is not None:
            self._answers.setdefault(request, []).append(lease.id)
        return self._told(lease)

    def repeated(self, client: str, idempotency_key: str | None) -> list[Lease]:
        """What is left of the answer that an earlier call under this key had: neither begun, given back nor lapsed."""
        if idempotency_key is None:
            return []
        return [self._told(self._pending[lease_id]) for lease_id in self._answers.get((client, idempotency_key), ())]

    def get(self, lease_id: str) -> PendingLease | None:
        return self._pending.get(lease_id)

    def pop(self, lease_id: str) -> PendingLease | None:
        """It ends, one way or the other; None where it has ended."""
        lease = self._pending.pop(lease_id, None)
        if lease is None:
            return None
        self._quota.give(lease.caller.client)
        if lease.request is not None:
            self._answers[lease.request].remove(lease_id)
            if not self._answers[lease.request]:
                del self._answers[lease.request]
        return lease

    def lapsed(self) -> list[PendingLease]:
        """End those under which nothing was begun in time."""
        now = self._clock()
        ended = [self.pop(lease.id) for lease in self if lease.expires < now]
        return [lease for lease in ended if lease is not None]

    def _told(self, lease: PendingLease) -> Lease:
        group = lease.ticket.group
        return Lease(
            lease_id=lease.id,
            task=task_model(group),
            group=GroupModel(id=group.id, size=group.size),
            split=group.split,
            policies=list(group.policies),
            expires_s=max(0.0, lease.expires - self._clock()),
        )
