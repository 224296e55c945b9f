"""One agent, or team of agents, whose policies are on several servers.

    async with AsyncTeam({"east": "https://east.example:8321", "west": "https://west.example:8321"}) as team:
        async with team.episode(task=task) as episode:
            ...                       # model calls at episode["east"].base_url with episode["east"].api_key
            await episode.finish({"east": 1.0, "west": 0.5})

Either all servers count the episode, or none does (docs/howto/multi-server.md).  The first server leads: it deals
out the tasks, and its word decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from wingbeat.client.episode import Episode
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.swarm import AgentVersion, AsyncSwarm, BeginOptions, LeaseOptions, check_work
from wingbeat.client.team_begin import TENTATIVE_S, Backoff, begin_everywhere
from wingbeat.client.team_commit import TeamCommit
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.client.team_journal import Entry, Journal, OpenEntry
from wingbeat.client.team_protocol import Coordinator
from wingbeat.core.addresses import server_address
from wingbeat.core.errors import OverloadedError, RequestError, WingbeatError
from wingbeat.core.protocol import FinishReply, Lease, LeaseReply
from wingbeat.core.types import Group, Outcome, Split, Task

logger = logging.getLogger("wingbeat.client")

MAX_LEASES = 4096
"""Leases whose version is remembered: more than any client holds at a time."""
CLOSE_S = 10.0
"""How long a team that closes goes on to tell servers how its episodes ended."""


class TeamBeginOptions(TypedDict, total=False):
    """How an episode of a team begins: under a ``lease`` of the leading server, or with a ``task`` of one's own."""

    lease: Lease
    task: Task
    group: Group
    split: Split
    policies: Mapping[str, Sequence[str]]
    """By server; of servers that are left out, all."""
    label: str
    code: str
    """With ``label``, the agent's version, as in :class:`BeginOptions`; under a lease, that of the lease."""
    idle_timeout_s: float


class AsyncTeam:
    """Several servers as one; use it on one event loop, with ``async with``.  It closes its swarms.

    ``lead`` (default: the first) deals out tasks and decides whether an episode counts.  Its address must be one
    that the other servers can be given: scheme, host and port.  ``journal`` is a folder, best on a local disk, that
    lets a successor end what this client had begun to finish when it died.  ``prepare_budget_s`` bounds the tries
    to report to a server that is away; then nobody counts the episode.
    """

    def __init__(
        self,
        servers: Mapping[str, AsyncSwarm | str],
        *,
        lead: str | None = None,
        key: str | None = None,
        journal: Path | str | None = None,
        prepare_budget_s: float = 240.0,
        rng: random.Random | None = None,
    ) -> None:
        if len(servers) < 1:
            raise RequestError("expected the servers of a team, got none", param="servers")
        lead = next(iter(servers)) if lead is None else lead
        if lead not in servers:
            raise RequestError(f"expected one of {', '.join(servers)} as lead, got {lead!r}", param="lead")
        ordered = {lead: servers[lead], **servers}
        self.swarms = {n: AsyncSwarm(s, key) if isinstance(s, str) else s for n, s in ordered.items()}
        self.lead = lead
        try:
            self._decider = server_address(self.swarms[lead].url)
        except ValueError as error:
            raise RequestError(f"the team's lead, {lead!r}: {error}", param="servers") from None
        self._journal = None if journal is None else Journal(Path(journal))
        self.prepare_budget_s = prepare_budget_s
        self._rng = rng or random.Random()
        self._retry = RetryPolicy(budget_s=120.0, base_s=0.5)
        self._backoff = Backoff(self._rng)
        self._endings: set[asyncio.Task[None]] = set()
        self._versions: OrderedDict[str, AgentVersion] = OrderedDict()
        """Which version of the agent a lease was dealt to: the other servers are told the same."""
        self._in_doubt: list[TeamCommit] = []
        """Ended without an answer of the lead; a repeated finish runs them again."""

    async def __aenter__(self) -> Self:
        """Also ends, in the background, what processes that died left in the journal."""
        if self._journal is not None:
            for entry in await asyncio.to_thread(lambda journal=self._journal: list(journal.left())):
                self._resume(entry)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Tell servers for some moments more what was decided, then end all connections.  Twice is harmless."""
        if self._endings:
            await asyncio.wait(self._endings, timeout=CLOSE_S)
        left = tuple(self._endings)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for commit in self._in_doubt:
            commit.let_go()
        if left:
            logger.warning("%d episodes were decided, and not every server has heard: it will ask the lead", len(left))
        await asyncio.gather(*(swarm.close() for swarm in self.swarms.values()))

    # --- what a runner needs of a swarm -------------------------------------------------------

    async def lease(self, max_leases: int = 1, **options: Unpack[LeaseOptions]) -> LeaseReply:
        """As :meth:`AsyncSwarm.lease`, of the leading server; after a refusal of another one at a time."""
        await self._backoff.wait()
        reply = await self.swarms[self.lead].lease(1 if self._backoff.is_on else max_leases, **options)
        for lease in reply.leases:
            self._versions[lease.lease_id] = options
        while len(self._versions) > MAX_LEASES:
            self._versions.popitem(last=False)
        return reply

    async def release(
        self, leases: Iterable[Lease] = (), *, leaving: bool = False, **version: Unpack[AgentVersion]
    ) -> int:
        """As :meth:`AsyncSwarm.release`, of the leading server."""
        return await self.swarms[self.lead].release(leases, leaving=leaving, **version)

    async def begin(self, **options: Unpack[TeamBeginOptions]) -> TeamEpisode:
        """Begin an episode on all servers, that the caller ends; :meth:`episode` is safer.

        With a task it waits, holding nothing, while a server has no room.  A lease is used up by a refusal: the call
        then waits a moment and raises OverloadedError, and its slot is free again for whoever leases next.
        """
        lease = options.get("lease")
        check_work(lease, options.get("task"))
        started, tries = time.monotonic(), 0
        while True:
            try:
                episodes = await begin_everywhere(self._begins(options), give_back=self._give_back(lease))
                self._backoff.accepted()
                return TeamEpisode(self, episodes)
            except WingbeatError as error:
                if not error.retryable:
                    raise
                if lease is not None:
                    self._backoff.refused(error)
                    await self._backoff.wait()
                    raise OverloadedError(f"not all servers of the team have room: {error.message}") from error
                delay = self._retry.delay_s(
                    tries,
                    elapsed_s=time.monotonic() - started,
                    retry_after_s=getattr(error, "retry_after_s", None),
                    rng=self._rng,
                )
                if delay is None:
                    raise
                await asyncio.sleep(delay)
                tries += 1

    @asynccontextmanager
    async def episode(self, **options: Unpack[TeamBeginOptions]) -> AsyncGenerator[TeamEpisode]:
        """An episode for the block; leaving it without ``finish`` aborts the episode on all servers."""
        async with await self.begin(**options) as episode:
            yield episode

    def _begins(self, options: TeamBeginOptions) -> dict[str, Callable[[], Awaitable[Episode]]]:
        lease, task, group = options.get("lease"), options.get("task"), options.get("group")
        version = self._versions.pop(lease.lease_id, {}) if lease is not None else {}
        common: BeginOptions = {
            "tentative_s": TENTATIVE_S,
            "label": options.get("label") or version.get("label", ""),
            "code": options.get("code") or version.get("code", ""),
        }
        if "idle_timeout_s" in options:
            common["idle_timeout_s"] = options["idle_timeout_s"]
        if lease is not None:
            task = Task(lease.task.source, lease.task.id, lease.task.payload)
            group = Group(lease.group.id, lease.group.size)
        assert task is not None
        own: BeginOptions = {**common, "task": task, "split": options.get("split", Split.TRAIN)}
        if group is not None:
            own["group"] = group
        if lease is not None:
            own["split"] = lease.split
        begins: dict[str, Callable[[], Awaitable[Episode]]] = {}
        for name, swarm in self.swarms.items():
            mine: BeginOptions = {**common, "lease": lease} if lease is not None and name == self.lead else {**own}
            policies = options.get("policies", {}).get(name)
            if policies is not None:
                mine["policies"] = policies
            begins[name] = _beginner(swarm, mine)
        return begins

    def _give_back(self, lease: Lease | None) -> Callable[[Mapping[str, Any], BaseException], Awaitable[None]]:
        async def give_back(granted: Mapping[str, Episode], error: BaseException) -> None:
            lasting = isinstance(error, WingbeatError) and not error.retryable
            lead = granted.get(self.lead)
            if lease is not None and lasting and lead is not None:
                # Another server will never take this member (its group has closed there): a try of the lead's slot is
                # used up, or it would be dealt again and again.
                await asyncio.gather(lead.confirm(), return_exceptions=True)
            message = f"another server of its team refused: {error}"
            aborts = (episode.abort(message, outcome=Outcome.INFRASTRUCTURE) for episode in granted.values())
            await asyncio.gather(*aborts, return_exceptions=True)

        return give_back

    # --- ends ---------------------------------------------------------------------------------

    async def new_commit(
        self,
        prepare: Callable[[str, str, str], Awaitable[FinishReply]],
        *,
        on_ended: Callable[[bool], Awaitable[None]],
    ) -> TeamCommit:
        """A transaction over all servers, in the journal.  ``prepare`` gets server, transaction id, decider."""
        transaction_id = secrets.token_urlsafe(24)
        names = tuple(self.swarms)
        entry = None
        if self._journal is not None:
            wanted = Entry(transaction_id, {name: self.swarms[name].url for name in names})
            entry = await asyncio.to_thread(self._journal.open, wanted)
        return TeamCommit(
            Coordinator(names),
            transaction_id,
            swarms=self.swarms,
            prepare=lambda name: prepare(name, transaction_id, "" if name == self.lead else self._decider),
            entry=entry,
            on_ended=on_ended,
        )

    def run_in_background(self, commit: TeamCommit) -> asyncio.Task[None]:
        """Whoever waits for the end may be cancelled; the end goes on."""
        task = asyncio.get_running_loop().create_task(commit.run(), name=f"transaction-{commit.transaction_id}")
        self._endings.add(task)
        task.add_done_callback(lambda done: self._ended(done, commit))
        return task

    def _ended(self, task: asyncio.Task[None], commit: TeamCommit) -> None:
        self._endings.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._in_doubt.append(commit)
        logger.warning("%s is in doubt: %s", task.get_name(), error)

    def _resume(self, left: OpenEntry) -> None:
        """End what a process that is gone had begun to finish."""
        by_url = {swarm.url: swarm for swarm in self.swarms.values()}
        strange = [url for url in left.entry.servers.values() if url not in by_url]
        if strange:
            logger.warning(
                "the journal's transaction %s is also of %s, no server of this team: left as it is",
                left.entry.transaction_id,
                ", ".join(strange),
            )
            left.release()
            return
        swarms = {name: by_url[url] for name, url in left.entry.servers.items()}
        coordinator = Coordinator.resumed(tuple(swarms), was_committing=left.entry.is_committing)
        logger.info("ending transaction %s, which a client left %s", left.entry.transaction_id, coordinator.phase.value)
        self.run_in_background(TeamCommit(coordinator, left.entry.transaction_id, swarms=swarms, entry=left))


def _beginner(swarm: AsyncSwarm, options: BeginOptions) -> Callable[[], Awaitable[Episode]]:
    return lambda: swarm.begin(**options)
