"""Handing out work: admission, leases, begins, signs of life.

    lease ── evaluation groups first ── then members of admitted groups ── then a new group, if the
             staleness gates of all its policies admit one ── else wait, and say what for.

A lease reserves a slot for ``LEASE_S``; beginning an episode under it starts the attempt.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from wingbeat.core.config import Config
from wingbeat.core.errors import (
    ConflictError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownPolicy,
    VersionGone,
)
from wingbeat.core.events import EventLog
from wingbeat.core.protocol import BeginReply, BeginRequest, GroupModel, Lease, LeaseReply, LeaseRequest
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook, ReleaseReason, SlotTicket
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.records import GroupSpec
from wingbeat.server.client_groups import ClientGroups, is_client_group
from wingbeat.server.episodes import EpisodeRegistry, OpenEpisode, new_episode_prefix, task_model
from wingbeat.server.evaluations import Evaluations
from wingbeat.server.issuing import ASKED_S, AtWork, Issuer, Sources
from wingbeat.server.keys import digest, new_episode_key
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies import PolicyHost
from wingbeat.server.signals import Changed
from wingbeat.server.status import NO_TASKS
from wingbeat.tracking.graph import EpisodeGraph

LEASE_S = 60.0


@dataclass(slots=True)
class PendingLease:
    """A slot that was handed out and not begun yet."""

    ticket: SlotTicket
    expires: float
    """Monotonic."""


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What handing out work needs."""

    config: Config
    policies: dict[str, PolicyHost]
    book: GroupBook
    dealer: TaskDealer
    ledger: Ledger
    registry: EpisodeRegistry
    evaluations: Evaluations
    events: EventLog
    metrics: ControlMetrics
    changed: Changed
    watch: Callable[[Future[Any]], None]
    is_complete: Callable[[], bool]
    is_stopping: Callable[[], bool]
    blockers: Callable[[], list[str]]
    clock: Callable[[], float]


class Rollouts:
    """Runs on control's event loop; decides synchronously, waits only for :class:`Changed`."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts
        self._leases: dict[str, PendingLease] = {}
        self._client_groups = ClientGroups()
        self._group_numbers = itertools.count()
        self.issuer = Issuer(
            parts.dealer,
            ledger=parts.ledger,
            watch=parts.watch,
            should_issue=self._should_issue,
            at_work=self._at_work,
            clock=parts.clock,
        )
        self._prefix = new_episode_prefix()

    # --- leases -------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Up to ``max_leases`` slots; waits for the first at most ``wait_s``."""
        deadline = self._parts.clock() + min(request.wait_s, self._parts.config.server.begin_wait_s)
        sources = None if request.sources is None else frozenset(request.sources)
        self.issuer.ask(sources)
        try:
            return await self._wait_for_leases(request, sources, deadline)
        finally:
            self.issuer.answered(sources)

    @property
    def num_waiting(self) -> int:
        """Clients that ask for leases now."""
        return self.issuer.num_waiting

    async def _wait_for_leases(self, request: LeaseRequest, sources: Sources, deadline: float) -> LeaseReply:
        while True:
            if self._parts.is_stopping():
                raise UnavailableError("the server is stopping; ask again when it is back")
            tickets = self._take(request.max_leases, request.splits, sources)
            if tickets:
                return LeaseReply(leases=[self._lease(ticket) for ticket in tickets])
            if self._parts.is_complete():
                return LeaseReply(leases=[], stop=True, reason="the run is complete")
            remaining = deadline - self._parts.clock()
            if remaining <= 0 or not await self._parts.changed.wait(remaining):
                own = self.issuer.reason(sources) if sources is not None else ""
                reasons = [own] if own else self._parts.blockers()
                return LeaseReply(leases=[], reason=reasons[0] if reasons else "no task is free")

    def _take(self, count: int, splits: Sequence[Split], sources: Sources) -> list[SlotTicket]:
        tickets: list[SlotTicket] = []
        while len(tickets) < count:
            group_id = self._next_group(splits, sources)
            if group_id is None:
                break
            tickets.append(self._parts.book.take(group_id))
        return tickets

    def _next_group(self, splits: Sequence[Split], sources: Sources) -> str | None:
        """The group whose slot goes next to a client of these sources, opening a new one where admission allows."""
        free = [
            g
            for g in self._parts.book.groups_with_free_slots()
            if not is_client_group(g.id) and (sources is None or g.task.source in sources)
        ]
        for split in (Split.EVAL, Split.TRAIN):
            if split not in splits:
                continue
            for group in free:
                if group.split is split:
                    return group.id
            spec = self._parts.evaluations.next_group(sources) if split is Split.EVAL else self._admit(sources)
            if spec is not None:
                self._open_group(spec)
                return spec.id
        return None

    def _admit(self, sources: Sources) -> GroupSpec | None:
        """A new training group on the next task, if every policy's staleness gate lets one in."""
        task = self.issuer.next_task(sources) if self._training_wants_more() else None
        return None if task is None else self._train_group(task, size=self._parts.config.dataflow.group_size)

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

    def _lease(self, ticket: SlotTicket) -> Lease:
        lease_id = f"lease-{secrets.token_hex(8)}"
        self._leases[lease_id] = PendingLease(ticket, self._parts.clock() + LEASE_S)
        group = ticket.group
        return Lease(
            lease_id=lease_id,
            task=task_model(group),
            group=GroupModel(id=group.id, size=group.size),
            split=group.split,
            policies=list(group.policies),
            expires_s=LEASE_S,
        )

    # --- begin --------------------------------------------------------------------------------

    async def begin(self, request: BeginRequest, *, base_url: str) -> BeginReply:
        """Start an attempt under a lease, or on a task that the client names.

        Raises RequestError, NotFoundError (lapsed lease), OverloadedError (admission stays full).
        """
        body_digest = digest(request.model_dump_json())
        if request.lease_id is None and request.task is None:
            raise RequestError("expected `lease_id` or `task`, got neither", param="task")
        if request.lease_id is None:
            self._check_policies(request.policies or tuple(self._parts.policies), request.split)
        deadline = self._parts.clock() + self._parts.config.server.begin_wait_s
        while True:
            known = self._parts.registry.replay_begin(request.idempotency_key, body_digest)
            if known is not None:  # also after a wait, in which the same begin may have been repeated
                return known
            ticket = self._redeem(request) if request.lease_id is not None else self._reserve(request)
            if ticket is not None:
                break
            await self._wait_for_room(deadline, request)
        reply = self._start(request, ticket, base_url)
        self._parts.registry.remember_begin(request.idempotency_key, body_digest, reply)
        return reply

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
        if declared is not None and self._client_groups.find(declared.id) is not None:
            return (
                f"group {declared.id!r} has its {declared.size} members: begin with another group id,"
                " or again if one of them fails"
            )
        if self._parts.is_complete():
            return "no room for another training episode: the run is complete"
        reasons = "; ".join(reason for reason in self._parts.blockers() if reason != NO_TASKS)
        return f"no room for another episode now: {reasons or 'admission is full'}"

    def _start(self, request: BeginRequest, ticket: SlotTicket, base_url: str) -> BeginReply:
        """Begin the attempt that a ticket allows: in the book, in the ledger and in memory."""
        group = ticket.group
        try:
            policies = self._in_order(dict(self._policy(name, group.split) for name in group.policies), group)
        except VersionGone:
            self._parts.book.release(ticket.episode_id, ticket.attempt, ReleaseReason.LEASE_EXPIRED)
            raise
        self._parts.book.begin(ticket.episode_id, ticket.attempt)
        self._parts.watch(
            self._parts.ledger.record_begin(ticket.episode_id, ticket.attempt, group_id=group.id, label=request.label)
        )
        return self._open(request, ticket, policies, base_url=base_url)

    def _in_order(self, policies: dict[str, int | None], group: GroupSpec) -> dict[str, int | None]:
        """Those that train first, else in the order of the configuration, or of the client that named them.

        The first is the default of agents that name none: the same one in training and in evaluations.
        """
        names = list(policies) if is_client_group(group.id) else [n for n in self._parts.policies if n in policies]
        return {n: policies[n] for n in sorted(names, key=lambda n: not self._parts.policies[n].config.trainable)}

    def _redeem(self, request: BeginRequest) -> SlotTicket:
        lease = self._leases.pop(request.lease_id or "", None)
        if lease is None:
            raise NotFoundError(f"lease {request.lease_id!r} has lapsed or was used; lease again", param="lease_id")
        return lease.ticket

    def _reserve(self, request: BeginRequest) -> SlotTicket | None:
        """A slot for a task that the client brings: of its group if that is open, else of a new one.

        None where there is no room now.
        """
        assert request.task is not None
        declared = request.group
        task = Task(source=request.task.source, id=request.task.id, payload=request.task.payload)
        own_id = self._client_groups.find(declared.id) if declared is not None else None
        if declared is not None and own_id is not None:
            return self._join(declared, own_id, task, request.split)
        names = [name.partition("@")[0] for name in request.policies or ()]
        if request.split is Split.TRAIN and (self._parts.is_complete() or not self._training_wants_more(names or None)):
            return None
        size = declared.size if declared is not None else 1
        spec = self._train_group(task, size=size, policies=names or None)
        spec = replace(spec, id=self._client_groups.add(declared.id if declared is not None else "", suffix=spec.id))
        if request.split is Split.EVAL:
            policies = tuple(request.policies or self._parts.policies)
            spec = GroupSpec(id=spec.id, task=task, split=Split.EVAL, size=size, policies=policies)
        self._open_group(spec)
        return self._parts.book.take(spec.id)

    def _join(self, declared: GroupModel, own_id: str, task: Task, split: Split) -> SlotTicket | None:
        """Another member of a group that a client declared earlier."""
        spec = next(g for g, _ in self._parts.book.progress() if g.id == own_id)
        opened = (spec.size, spec.task.source, spec.task.id, spec.split)
        if opened != (declared.size, task.source, task.id, split):
            raise ConflictError(
                f"group {declared.id!r} was opened with size {spec.size} on {spec.split} task {spec.task.id!r};"
                f" got size {declared.size} on {split} task {task.id!r}",
                param="group",
            )
        free = {g.id for g in self._parts.book.groups_with_free_slots()}
        return self._parts.book.take(own_id) if own_id in free else None

    def _check_policies(self, names: Sequence[str], split: Split) -> None:
        """Raises UnknownPolicy, RequestError or VersionGone, also where a training episode could train nothing."""
        bases = [self._policy(name, split)[0] for name in names]
        if split is Split.TRAIN and not any(self._parts.policies[base].config.trainable for base in bases):
            raise RequestError(
                f"a training episode needs a policy that trains, got only frozen ones: {', '.join(bases)};"
                ' name one that trains in `policies`, or begin with `split` "eval"',
                param="policies",
            )

    def _policy(self, name: str, split: Split) -> tuple[str, int | None]:
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

    def _open(
        self, request: BeginRequest, ticket: SlotTicket, policies: dict[str, int | None], *, base_url: str
    ) -> BeginReply:
        """Create the attempt in memory and the reply that describes it."""
        group, server = ticket.group, self._parts.config.server
        key = new_episode_key()
        episode = OpenEpisode(
            episode_id=ticket.episode_id,
            attempt=ticket.attempt,
            group=group,
            policies=policies,
            label=request.label,
            key_digest=digest(key),
            idle_timeout_s=request.idle_timeout_s or server.idle_timeout_s,
            began_s=time.time(),
            last_seen=self._parts.clock(),
            graph=EpisodeGraph(ticket.episode_id),
        )
        self._parts.registry.add(episode)
        return BeginReply(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            base_url=base_url,
            api_key=key,
            policies=list(episode.policies),
            heartbeat_s=server.heartbeat_s,
            task=task_model(group),
            group=GroupModel(id=group.id, size=group.size),
            split=group.split,
        )

    # --- life ---------------------------------------------------------------------------------

    def reap(self) -> None:
        """End leases that lapsed and attempts that fell silent: their slots reopen."""
        now = self._parts.clock()
        for lease_id in [k for k, lease in self._leases.items() if lease.expires < now]:
            ticket = self._leases.pop(lease_id).ticket
            with contextlib.suppress(ConflictError):  # its group has closed, or a late finish took the slot
                self._parts.book.release(ticket.episode_id, ticket.attempt, ReleaseReason.LEASE_EXPIRED)
            self._parts.changed.notify()
        for episode in self._parts.registry.silent(self._parts.config.server.heartbeat_s):
            self._parts.registry.lose(episode)
            self._parts.book.release(episode.episode_id, episode.attempt, ReleaseReason.LOST)
            self._parts.watch(
                self._parts.ledger.record_end(
                    episode.episode_id, episode.attempt, state=AttemptState.LOST, outcome=Outcome.CLIENT
                )
            )
            self._parts.metrics.episodes.labels(episode.split, "lost").inc()
            self._parts.events.emit("episode_lost", episode_id=episode.episode_id, attempt=episode.attempt)
            self._parts.changed.notify()
        removed = self._parts.dealer.removed
        for group, _ in self._parts.book.progress():
            # only its client could fill it, or the clients of a source that is gone and may have left
            if is_client_group(group.id) or group.task.source in removed:
                self._parts.book.abandon(group.id)

    def restore_groups(self, group_ids: Iterable[str]) -> None:
        """Groups that were open when the server stopped."""
        self._client_groups.restore(group_ids)

    def forget_groups(self, group_ids: set[str]) -> None:
        """Groups that closed: their clients' names for them take no more members."""
        self._client_groups.close(group_ids)
