"""Handing out work: admission, leases, begins, signs of life.

    lease ── evaluation groups first ── then members of admitted groups ── then a new group, if the
             staleness gates of all its policies admit one ── else wait, and say what for.

A lease reserves a slot for ``server.lease_s``; beginning an episode under it starts the attempt.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from wingbeat.core.errors import (
    ConflictError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from wingbeat.core.protocol import BeginReply, BeginRequest, GroupModel, LeaseReply, LeaseRequest
from wingbeat.core.types import OUTCOME_OF, Cause, Split, Task, Variant
from wingbeat.dataflow.groups import ReleaseReason, SlotTicket
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.records import GroupSpec
from wingbeat.dataflow.variants import Asker
from wingbeat.server.episodes.begins import Begins, Caller
from wingbeat.server.episodes.client_groups import ClientGroups, is_client_group
from wingbeat.server.episodes.issuing import ASKED_S, AtWork, Issuer, Sources
from wingbeat.server.episodes.lease_turns import LeaseTurns
from wingbeat.server.episodes.leases import Leases, PendingLease
from wingbeat.server.episodes.recovery import interrupt
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode, new_episode_prefix
from wingbeat.server.episodes.rollout_parts import RolloutParts
from wingbeat.server.keys.ring import digest
from wingbeat.server.status import NO_TASKS


class Rollouts:
    """Runs on control's event loop; decides synchronously, waits only for :class:`Changed`."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts
        self._leases = Leases(parts.limits.leases, lease_s=parts.config.server.lease_s, clock=parts.clock)
        self.begins = Begins(parts)
        self.client_groups = ClientGroups()
        self._group_numbers = itertools.count()
        self.issuer = Issuer(
            parts.dealer,
            ledger=parts.ledger,
            watch=parts.watch,
            should_issue=self._should_issue,
            at_work=self._at_work,
            clock=parts.clock,
        )
        self._turns = LeaseTurns(self._take, quota=parts.limits.leases, changed=parts.changed)
        self._prefix = new_episode_prefix()

    # --- leases -------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Up to ``max_leases`` slots; waits for the first at most ``wait_s``.

        The same idempotency key again gets what is left of the answer that it had.
        """
        answered = self._leases.repeated(request.client_id, request.idempotency_key)
        if answered:
            return LeaseReply(leases=answered)
        deadline = self._parts.clock() + min(request.wait_s, self._parts.config.server.begin_wait_s)
        sources = None if request.sources is None else frozenset(request.sources)
        self.issuer.ask(sources)
        try:
            with self._parts.limits.waiting.holding(request.client_id), self._parts.variants.asking(request):
                return await self._wait_for_leases(request, sources, deadline)
        finally:
            self.issuer.answered(sources)

    @property
    def num_leased(self) -> int:
        """Slots that were handed out and not begun yet."""
        return len(self._leases)

    @property
    def num_waiting(self) -> int:
        """Clients that ask for leases now."""
        return self.issuer.num_waiting

    async def _wait_for_leases(self, request: LeaseRequest, sources: Sources, deadline: float) -> LeaseReply:
        waiter = self._turns.join(request, sources)
        try:
            while True:
                if self._parts.is_stopping():
                    raise UnavailableError("the server is stopping; ask again when it is back")
                self._turns.serve(waiter)
                if waiter.got:
                    caller = Caller(request.client_id, request.code, request.label)
                    key = request.idempotency_key
                    leases = [self._leases.add(ticket, caller, idempotency_key=key) for ticket in waiter.got]
                    waiter.got.clear()
                    return LeaseReply(leases=leases)
                if self._parts.is_complete():
                    return LeaseReply(leases=[], stop=True, reason="the run is complete")
                remaining = deadline - self._parts.clock()
                is_over = remaining <= 0 or not await self._parts.changed.wait(remaining)
                if is_over and not waiter.got:
                    own = self.issuer.reason(sources) if sources is not None else ""
                    own = own or self._parts.variants.reason(request.label)
                    reasons = [own] if own else self._parts.blockers()
                    return LeaseReply(leases=[], reason=reasons[0] if reasons else "no task is free")
        finally:
            self._turns.leave(waiter)
            for ticket in waiter.got:  # handed to a caller that is gone
                self._parts.limits.leases.give(request.client_id)
                self._give_back(ticket)

    def _take(self, request: LeaseRequest, sources: Sources) -> SlotTicket | None:
        """One slot for such a request; None where there is none."""
        variant = Variant(request.label, request.code)
        group_id = self._next_group(request.splits, sources, variant)
        if group_id is None:
            return None
        ticket = self._parts.book.take(group_id, variant)
        self._parts.variants.taken(ticket, request)
        return ticket

    def release(self, lease_ids: Iterable[str], *, client: str, leaver: Asker | None = None) -> int:
        """A client gives back leases of its own (all, of a process that leaves); returns how many it still held."""
        own = [lease for lease_id in lease_ids if (lease := self._leases.get(lease_id)) is not None]
        if leaver is not None:
            own += [lease for lease in self._leases if self._parts.variants.taker(lease.ticket) == leaver]
        mine = {lease.id: lease for lease in own if lease.caller.client == client}
        for lease in mine.values():
            self._leases.pop(lease.id)
            self._give_back(lease.ticket)
        return len(mine)

    def _give_back(self, ticket: SlotTicket) -> None:
        """Nobody began under it."""
        with contextlib.suppress(ConflictError):  # its group has closed, or a late finish took the slot
            self._parts.book.release(ticket.episode_id, ticket.attempt, ReleaseReason.LEASE_EXPIRED)
        self._parts.changed.notify()

    def _next_group(self, splits: Sequence[Split], sources: Sources, variant: Variant) -> str | None:
        """The group whose slot goes next to such a client, opening a new one where admission allows."""
        variants = self._parts.variants
        free = [g for g in variants.free_groups(variant) if sources is None or g.task.source in sources]
        for split in (Split.EVAL, Split.TRAIN):
            if split not in splits:
                continue
            for group in free:
                if group.split is split:
                    return group.id
            is_eval = split is Split.EVAL
            spec = variants.next_evaluation(sources, variant) if is_eval else self._admit(sources, variant)
            if spec is not None:
                self._open_group(spec)
                return spec.id
        return None

    def _admit(self, sources: Sources, variant: Variant) -> GroupSpec | None:
        """A new training group on the next task, if every policy's staleness gate lets one in."""
        if not self._training_wants_more() or not self._parts.variants.may_open(variant):
            return None
        task = self.issuer.next_task(sources)
        if task is None:
            self._parts.variants.mix.empty_handed(variant.label)
            return None
        spec = self._train_group(task, size=self._parts.config.dataflow.group_size)
        self._parts.variants.opened(spec, variant)
        return spec

    def _open_group(self, spec: GroupSpec) -> None:
        """Into the book and, with the dealer's place, into the ledger."""
        ids = self._parts.book.open_group(spec)
        state = self._parts.dealer.state_dict() if spec.split is Split.TRAIN else None
        self._parts.watch(self._parts.ledger.record_group(spec, episode_ids=ids, dealer_state=state))

    def _training_wants_more(self, policies: Sequence[str] | None = None) -> bool:
        hosts = [h for h in self._parts.policies.values() if policies is None or h.name in policies]
        return all(h.admits_group() for h in hosts) and any(h.config.trainable and not h.complete for h in hosts)

    def _should_issue(self, task: Task) -> bool:
        """Whether some policy that still trains wants this task: only where the operators of all pass it over, no."""
        hosts = [h for h in self._parts.policies.values() if h.config.trainable and not h.complete]
        answers = [h.chain.should_issue(task) for h in hosts]  # all are asked: each keeps its own count
        return any(answers)

    def _at_work(self) -> AtWork:
        """What runs, and what was begun, by source."""
        horizon = self._parts.clock() - ASKED_S
        open_episodes = self._parts.registry.open_episodes()
        dealt = (group for group, _ in self._parts.book.progress() if not is_client_group(group.id))
        return AtWork(
            running=frozenset(e.group.task.source for e in open_episodes if e.calls or e.last_seen >= horizon),
            unfinished=Counter(group.task.source for group in dealt if group.split is Split.TRAIN),
        )

    def _train_group(self, task: Task, *, size: int, policies: Sequence[str] | None = None) -> GroupSpec:
        names = tuple(policies or self._parts.policies)
        floors = {name: self._parts.policies[name].lowest_version() for name in names}
        group_id = f"{self._prefix}-{next(self._group_numbers)}"
        return GroupSpec(id=group_id, task=task, split=Split.TRAIN, size=size, policies=names, floor_version=floors)

    # --- begin --------------------------------------------------------------------------------

    async def begin(self, request: BeginRequest, *, base_url: str) -> BeginReply:
        """Start an attempt under a lease, or on a task that the client names.

        Raises RequestError, NotFoundError (lapsed lease), OverloadedError (admission stays full).
        """
        body_digest = digest(request.model_dump_json(exclude_defaults=True))
        if request.lease_id is None and request.task is None:
            raise RequestError("expected `lease_id` or `task`, got neither", param="task")
        if request.lease_id is None:
            self.begins.check_policies(request.policies or tuple(self._parts.policies), request.split)
        self.begins.recollect(request.idempotency_key, body_digest)
        # whoever begins tentatively holds slots elsewhere, and must not hold them while it waits here
        patience = 0.0 if request.tentative_s is not None else self._parts.config.server.begin_wait_s
        deadline = self._parts.clock() + patience
        caller = Caller(request.client_id, request.code, request.label)
        while True:
            begun = self.begins.repeated(request.idempotency_key, body_digest)
            if begun is not None:  # also after a wait, in which the same begin may have been repeated
                break
            self._parts.limits.episodes.check(request.client_id)
            lease = None
            if request.lease_id is not None:
                lease = self._redeem(request)
            ticket = self._reserve(request) if lease is None else lease.ticket
            if ticket is not None:
                caller = caller if lease is None else caller.under(lease.caller)
                begun = self.begins.start(request, ticket, caller, body_digest=body_digest)
                break
            with self._parts.limits.waiting.holding(request.client_id):
                await self._wait_for_room(deadline, request)
        return await self.begins.answer(begun, base_url=base_url)

    async def _wait_for_room(self, deadline: float, request: BeginRequest) -> None:
        """Returns when something changed.  Raises OverloadedError at the deadline, UnavailableError at the end."""
        if self._parts.is_stopping():
            raise UnavailableError("the server is stopping; begin again when it is back")
        remaining = deadline - self._parts.clock()
        if remaining <= 0 or not await self._parts.changed.wait(remaining):
            raise OverloadedError(self._no_room(request), retry_after_s=2.0)

    def _no_room(self, request: BeginRequest) -> str:
        """Why a task that its client brings cannot begin now.  Raises ConflictError where its group has closed."""
        declared = request.group
        if declared is not None and self.client_groups.find(declared.id) is not None:
            return (
                f"group {declared.id!r} has its {declared.size} members: begin with another group id,"
                " or again if one of them fails"
            )
        if self._parts.is_complete():
            return "no room for another training episode: the run is complete"
        reasons = "; ".join(reason for reason in self._parts.blockers() if reason != NO_TASKS)
        return f"no room for another episode now: {reasons or 'admission is full'}"

    def _redeem(self, request: BeginRequest) -> PendingLease:
        lease = self._leases.pop(request.lease_id or "")
        if lease is None:
            raise NotFoundError(f"lease {request.lease_id!r} has lapsed or was used; lease again", param="lease_id")
        if request.code and lease.caller.code and request.code != lease.caller.code:
            self._give_back(lease.ticket)
            got = Variant(request.label, request.code)
            raise ConflictError(
                f"this lease was given to the agent version {lease.ticket.variant}, got {got}: begin with the code that"
                " leased",
                param="code",
            )
        return lease

    def _reserve(self, request: BeginRequest) -> SlotTicket | None:
        """A slot for a task that the client brings: of its group if that is open, else of a new one.

        None where there is no room now.
        """
        assert request.task is not None
        declared = request.group
        task = Task(source=request.task.source, id=request.task.id, payload=request.task.payload)
        own_id = self.client_groups.find(declared.id) if declared is not None else None
        if declared is not None and own_id is not None:
            return self._join(declared, own_id, task, request)
        names = [name.partition("@")[0] for name in request.policies or ()]
        if request.split is Split.TRAIN and (self._parts.is_complete() or not self._training_wants_more(names or None)):
            return None
        size = declared.size if declared is not None else 1
        spec = self._train_group(task, size=size, policies=names or None)
        spec = replace(spec, id=self.client_groups.add(declared.id if declared is not None else "", suffix=spec.id))
        if request.split is Split.EVAL:
            policies = tuple(request.policies or self._parts.policies)
            spec = GroupSpec(id=spec.id, task=task, split=Split.EVAL, size=size, policies=policies)
        self._open_group(spec)
        return self._parts.book.take(spec.id, Variant(code=request.code))

    def _join(self, declared: GroupModel, own_id: str, task: Task, request: BeginRequest) -> SlotTicket | None:
        """Another member of a group that a client declared earlier, run by the same code."""
        split = request.split
        spec = next(g for g, _ in self._parts.book.progress() if g.id == own_id)
        opened = (spec.size, spec.task.source, spec.task.id, spec.split)
        if opened != (declared.size, task.source, task.id, split):
            raise ConflictError(
                f"group {declared.id!r} was opened with size {spec.size} on {spec.split} task {spec.task.id!r};"
                f" got size {declared.size} on {split} task {task.id!r}",
                param="group",
            )
        free = {g.id for g in self._parts.book.groups_with_free_slots()}
        return self._parts.book.take(own_id, Variant(code=request.code)) if own_id in free else None

    # --- life ---------------------------------------------------------------------------------

    def reap(self) -> None:
        """End leases that lapsed and attempts that fell silent: their slots reopen."""
        for lease in self._leases.lapsed():
            self._parts.endings.note(lease.ticket.group.split, Cause.LEASE_EXPIRED)
            self._give_back(lease.ticket)
        self.begins.reap()
        for episode in self._parts.registry.silent(self._parts.config.server.heartbeat_s):
            if episode.is_unheard:
                interrupt(self._parts, episode)
            else:
                self._lose(episode)
        self._parts.variants.reap()
        removed = self._parts.dealer.removed
        for group, _ in self._parts.book.progress():
            # only its client could fill it, or the clients of a source that is gone and may have left
            if is_client_group(group.id) or group.task.source in removed:
                self._parts.book.abandon(group.id)

    def _lose(self, episode: OpenEpisode) -> None:
        """No sign of life: its slot reopens, and a late finish may still count."""
        cause = Cause.HEARTBEAT_LOST if episode.has_heartbeat else Cause.CLIENT_VANISHED
        self._parts.registry.lose(episode)
        episode.cause = cause
        self._parts.book.release(episode.episode_id, episode.attempt, ReleaseReason.LOST)
        self._parts.watch(
            self._parts.ledger.record_end(
                episode.episode_id, episode.attempt, state=AttemptState.LOST, outcome=OUTCOME_OF[cause], cause=cause
            )
        )
        self._parts.metrics.episodes.labels(episode.split, "lost").inc()
        self._parts.endings.note(episode.split, cause)
        self._parts.variants.ended(episode, "lost")
        self._parts.events.emit("episode_lost", episode_id=episode.episode_id, attempt=episode.attempt, cause=cause)
        self._parts.changed.notify()

    def overdue(self) -> Iterator[OpenEpisode]:
        """Attempts that run longer than any may (``dataflow.episode_deadline_s``).

        One after the other: ending one may close its group, and that ends others.
        """
        limit = self._parts.config.dataflow.episode_deadline_s
        horizon = self._parts.clock() - (limit or math.inf)
        for episode in self._parts.registry.open_episodes():
            if episode.state is EpisodeState.OPEN and episode.opened < horizon:
                yield episode
