"""Attempts that begin: what they are made of, what makes them durable, and begins that are repeated.

A begin is acknowledged once it is on disk, so that the attempt goes on if control dies the next moment.  The
same begin again means the same attempt, also after a restart: the successor of a control that died knows no
keys, only their digests, and answers with another key beside the first.

A **tentative** attempt holds its slot as a lease does: nothing is recorded and no attempt is used up.  What it
would replace goes on until it is confirmed::

    hold ──confirm──▶ begun (durable)
      ╰───── lapse, withdraw ─────▶ aborted; the slot is free again
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wingbeat.core.errors import (
    ConflictError,
    EpisodeClosed,
    IdempotencyConflict,
    RequestError,
    UnavailableError,
    UnknownPolicy,
    VersionGone,
)
from wingbeat.core.protocol import BeginReply, BeginRequest, GroupModel
from wingbeat.core.types import Cause, Split
from wingbeat.dataflow.groups import ReleaseReason, SlotTicket
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.records import BeginRecord, GroupSpec
from wingbeat.server.episodes.client_groups import is_client_group
from wingbeat.server.episodes.durable import until_durable
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode, task_model
from wingbeat.server.keys.ring import digest, new_episode_key
from wingbeat.tracking.graph import EpisodeGraph

if TYPE_CHECKING:
    from wingbeat.server.episodes.rollout_parts import RolloutParts

REMEMBERED = 4096
"""Begins whose repeats get the same key again: a client repeats one within moments.  The ledger knows the older ones,
and whose attempts go on get another key."""
GOES_ON = frozenset({EpisodeState.OPEN, EpisodeState.LOST, EpisodeState.PREPARED})
"""States in which a key is worth something."""
DURABLE_S = 20.0
"""How long a begin waits for the disk before its client is told to ask again."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who runs an attempt, as its lease or its begin said."""

    client: str = ""
    code: str = ""
    label: str = ""

    def under(self, lease: Caller) -> Caller:
        """What is not said here, the lease said."""
        return Caller(self.client or lease.client, self.code or lease.code, self.label or lease.label)


@dataclass(slots=True)
class Begun:
    """A begin by its idempotency key."""

    body_digest: str
    episode: OpenEpisode
    key: str = ""
    """What was answered; "" where another process did."""


class Begins:
    """Runs on control's event loop."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts
        self._begun: OrderedDict[str, Begun] = OrderedDict()
        """By idempotency key, oldest first."""
        self._has_forgotten = False
        """Whether there may have been others."""

    # --- repeats ------------------------------------------------------------------------------

    def repeated(self, idempotency_key: str, body_digest: str) -> Begun | None:
        """The earlier begin under this key; None for a new one.  Raises IdempotencyConflict."""
        known = self._begun.get(idempotency_key)
        if known is not None:
            _check_body(idempotency_key, known.body_digest, body_digest)
        return known

    def recollect(self, idempotency_key: str, body_digest: str) -> None:
        """A key that this process does not know may have begun an attempt, which it must not begin twice.

        Raises EpisodeClosed where that has ended, IdempotencyConflict for another body.
        """
        if not self._has_forgotten or idempotency_key in self._begun:
            return
        earlier = self._parts.ledger.begun(idempotency_key)
        if earlier is None or earlier.state is AttemptState.INTERRUPTED:  # a restart's fault: it may try again
            return
        begin = earlier.begin
        _check_body(idempotency_key, begin.begin_digest, body_digest)
        current = self._parts.registry.current(begin.episode_id)
        if current is not None and current.attempt == begin.attempt and current.state in GOES_ON:
            return self.restored(current)
        raise EpisodeClosed(
            f"episode {begin.episode_id} attempt {begin.attempt}, which this key began, is {earlier.state};"
            " begin another one with a new key"
        )

    def restarted(self) -> None:
        """An earlier process began attempts, too."""
        self._has_forgotten = True

    def restored(self, episode: OpenEpisode) -> None:
        """An attempt that an earlier process began."""
        if episode.idempotency_key:
            self._remember(Begun(episode.begin_digest, episode))

    def _remember(self, begun: Begun) -> None:
        self._begun[begun.episode.idempotency_key] = begun
        for _ in range(2):  # after many at once the number falls again
            if len(self._begun) > REMEMBERED:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Unless it is tentative: the ledger does not know it, and a repeat would begin another."""
        key, begun = next(iter(self._begun.items()))
        if begun.episode.state is EpisodeState.TENTATIVE:
            self._begun.move_to_end(key)
        else:
            del self._begun[key]
            self._has_forgotten = True

    async def answer(self, begun: Begun, *, base_url: str) -> BeginReply:
        """The reply, once the attempt is durable.

        Raises UnavailableError where that takes too long, EpisodeClosed for a begin of an earlier process whose
        attempt has ended since: nothing can be done with its key any more.
        """
        episode, parts = begun.episode, self._parts
        if not begun.key:
            if episode.state not in GOES_ON:
                raise EpisodeClosed(
                    f"episode {episode.episode_id} attempt {episode.attempt}, which this key began, is {episode.state};"
                    " begin another one"
                )
            key = new_episode_key()
            parts.registry.add_key(episode, digest(key))
            episode.begin_write = parts.ledger.add_key(episode.episode_id, episode.attempt, digest(key))
            parts.watch(episode.begin_write)
            begun.key = key
        await self._durable(episode)
        group = episode.group
        return BeginReply(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            base_url=base_url,
            api_key=begun.key,
            policies=list(episode.policies),
            heartbeat_s=parts.config.server.heartbeat_s,
            task=task_model(group),
            group=GroupModel(id=group.id, size=group.size),
            split=group.split,
        )

    async def _durable(self, episode: OpenEpisode) -> None:
        write = episode.begin_write
        if write is None:
            return
        if not write.done() or write.exception() is not None:
            try:
                async with asyncio.timeout(DURABLE_S):
                    await until_durable(write)
            except TimeoutError:
                why = self._parts.ledger.blocked or "the disk is slow"
                raise UnavailableError(
                    f"this begin is not on disk yet ({why}); send it again, it stays the same"
                ) from None
        if episode.begin_write is write:  # else another key was added meanwhile
            episode.begin_write = None

    # --- new attempts -------------------------------------------------------------------------

    def start(self, request: BeginRequest, ticket: SlotTicket, caller: Caller, *, body_digest: str) -> Begun:
        """Begin the attempt that a ticket allows.  Raises VersionGone, and then its slot is free again."""
        group = ticket.group
        try:
            policies = self._in_order(dict(self.policy(name, group.split) for name in group.policies), group)
        except VersionGone:
            self._parts.book.release(ticket.episode_id, ticket.attempt, ReleaseReason.LEASE_EXPIRED)
            raise
        key = new_episode_key()
        episode = OpenEpisode(
            episode_id=ticket.episode_id,
            attempt=ticket.attempt,
            group=group,
            policies=policies,
            label=caller.label,
            client=caller.client,
            code=caller.code,
            key_digest=digest(key),
            idle_timeout_s=request.idle_timeout_s or self._parts.config.server.idle_timeout_s,
            began_s=time.time(),
            last_seen=self._parts.clock(),
            graph=EpisodeGraph(ticket.episode_id),
            has_heartbeat=request.heartbeats,
            idempotency_key=request.idempotency_key,
            begin_digest=body_digest,
        )
        if request.tentative_s is None:
            self._begin(episode)
        else:
            episode.state = EpisodeState.TENTATIVE
            episode.lapses_at = self._parts.clock() + request.tentative_s
            self._parts.registry.hold(episode)
        begun = Begun(body_digest, episode, key)
        self._remember(begun)
        return begun

    def _begin(self, episode: OpenEpisode) -> None:
        """In the book, in the ledger and in memory.  Raises ConflictError where the slot is not held any more."""
        parts = self._parts
        parts.book.begin(episode.episode_id, episode.attempt)
        record = BeginRecord(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            group_id=episode.group.id,
            label=episode.label,
            client=episode.client,
            code=episode.code,
            idempotency_key=episode.idempotency_key,
            begin_digest=episode.begin_digest,
            key_digest=episode.key_digest,
            policies=episode.policies,
            idle_timeout_s=episode.idle_timeout_s,
            heartbeats=episode.has_heartbeat,
        )
        episode.begin_write = parts.ledger.record_begin(record)
        parts.watch(episode.begin_write)
        parts.registry.add(episode)

    # --- trials -------------------------------------------------------------------------------

    async def confirm(self, episode: OpenEpisode) -> None:
        """A tentative attempt becomes ordinary; repeats are harmless.

        Raises EpisodeClosed where it lapsed or its group has closed, ConflictError where another attempt took the
        slot (a late finish of the one before), UnavailableError where the disk takes too long.
        """
        if episode.state is EpisodeState.TENTATIVE:
            try:
                self._begin(episode)
            except ConflictError as error:
                self.withdraw(episode, error.message)
                raise
            episode.become(EpisodeState.OPEN)
            episode.last_seen = self._parts.clock()
        elif episode.state is EpisodeState.ABORTED:
            raise EpisodeClosed(
                f"episode {episode.episode_id} attempt {episode.attempt} was not confirmed in time or was withdrawn"
                f"{f' ({episode.message})' if episode.message else ''}; begin again"
            )
        await self._durable(episode)

    def withdraw(self, episode: OpenEpisode, message: str) -> bool:
        """Give up a tentative attempt: its slot is free again.  False where it is none (any more)."""
        if episode.state is not EpisodeState.TENTATIVE:
            return False
        parts = self._parts
        with contextlib.suppress(ConflictError):  # its group has closed, or a late finish took the slot
            parts.book.release(episode.episode_id, episode.attempt, ReleaseReason.LEASE_EXPIRED)
        episode.ended_by(Cause.TENTATIVE_LAPSED, message)
        parts.endings.note(episode.split, Cause.TENTATIVE_LAPSED)
        parts.registry.end(episode, EpisodeState.ABORTED)
        parts.events.emit("trial_ended", episode_id=episode.episode_id, attempt=episode.attempt, message=message)
        parts.changed.notify()
        return True

    def reap(self) -> None:
        """Tentative attempts that nobody confirmed in time."""
        for episode in self._parts.registry.lapsed():
            self.withdraw(episode, "it was not confirmed in time")

    # --- policies -----------------------------------------------------------------------------

    def _in_order(self, policies: dict[str, int | None], group: GroupSpec) -> dict[str, int | None]:
        """Those that train first, else in the order of the configuration, or of the client that named them.

        The first is the default of agents that name none: the same one in training and in evaluations.
        """
        names = list(policies) if is_client_group(group.id) else [n for n in self._parts.policies if n in policies]
        return {n: policies[n] for n in sorted(names, key=lambda n: not self._parts.policies[n].config.trainable)}

    def check_policies(self, names: Sequence[str], split: Split) -> None:
        """Raises UnknownPolicy, RequestError or VersionGone, also where a training episode could train nothing."""
        bases = [self.policy(name, split)[0] for name in names]
        if split is Split.TRAIN and not any(self._parts.policies[base].config.trainable for base in bases):
            raise RequestError(
                f"a training episode needs a policy that trains, got only frozen ones: {', '.join(bases)};"
                ' name one that trains in `policies`, or begin with `split` "eval"',
                param="policies",
            )

    def policy(self, name: str, split: Split) -> tuple[str, int | None]:
        """Parse ``"solver"`` or ``"solver@12"``.  Raises UnknownPolicy, RequestError or VersionGone."""
        base, at, version = name.partition("@")
        host = self._parts.policies.get(base)
        if host is None:
            raise UnknownPolicy(
                f"no policy {base!r} here; this server has {', '.join(self._parts.policies)}", param="policies"
            )
        if not at:
            return base, None
        if split is not Split.EVAL or not version.isdecimal():
            raise RequestError(f"{name!r}: only eval episodes may pin a version, as NAME@NUMBER", param="policies")
        if not host.is_pinned(int(version)):
            raise VersionGone(f"{name!r} is not held: POST /api/evaluations pins a version", param="policies")
        return base, int(version)


def _check_body(idempotency_key: str, known: str, got: str) -> None:
    if known != got:
        raise IdempotencyConflict(
            f"idempotency key {idempotency_key!r} was used with another body; use a new key per episode"
        )
