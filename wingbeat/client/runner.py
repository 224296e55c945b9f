"""The runner: leases episodes and keeps ``concurrency`` of them running.

    lease loop  ── leases ──▶  ready queue  ──▶  one task per episode  ── reward ──▶ server
       ▲   waits for: room        │ waits for: a free slot       │
       └────────── woken by: an episode that ends ◀──────────────┘

Invariants: at most ``concurrency`` episodes run; a lease that lapsed while it waited is never begun;
an exception in an agent ends its own episode only; nothing new begins after ``stop``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wingbeat.client.agents import Agent, AsyncAgentFunction, SyncAgentFunction
from wingbeat.client.blame import format_error
from wingbeat.client.deadlines import Deadline, EpisodeOverdue, memory_mb
from wingbeat.client.episode import Episode, EpisodeState
from wingbeat.client.rewards import RewardLike, to_rewards
from wingbeat.client.runner_stats import EpisodeEnd, RunnerStats
from wingbeat.client.swarm import AgentVersion, AsyncSwarm
from wingbeat.client.team import AsyncTeam
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.core.errors import (
    AuthenticationError,
    PermissionDenied,
    RequestError,
    SetupError,
    UnavailableError,
    WingbeatError,
)
from wingbeat.core.ports import Clock
from wingbeat.core.protocol import Lease, LeaseReply
from wingbeat.core.signals import Changed
from wingbeat.core.types import Cause, Outcome, Split

logger = logging.getLogger("wingbeat.client")

_MAX_LEASES = 256
"""The wire's limit for one lease call."""
_PREFETCH_HORIZON_S = 0.5
"""Leases for slots that become free within this time are fetched ahead: some round trips, far less than
a lease lives.  Slow agents therefore hold no lease that another client could already run."""
_EMPTY_PAUSE_S = 0.2
"""Least time between lease calls that bring nothing, should a server not wait."""
_ABORT_S = 10.0
"""How long cancelled episodes may take to report that they were aborted."""
_MEAN_WEIGHT = 0.1
"""Weight of the newest episode in the moving mean of durations."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What a runner takes on, and how it leaves."""

    grace_s: float = 10.0
    """How long running episodes may go on after a stop before they are aborted."""
    splits: Sequence[Split] = (Split.TRAIN, Split.EVAL)
    sources: Sequence[str] | None = None
    """Task sources to run; None: those that the agent declares, else all."""
    max_episodes: int | None = None
    """Ends after so many; None runs until told to stop."""
    label: str = ""
    """Names this version of the agent, for people and for comparison."""
    episode_timeout_s: float | None = None
    """The longest life of an episode: then it is aborted as ``timeout``, its agent is cancelled and its slot is free.
    None sets no bound."""
    max_memory_mb: int | None = None
    """A process that holds more between two episodes asks to be replaced."""


TELLING = (AuthenticationError, PermissionDenied, UnavailableError)
"""Refusals that somebody should mend: a key, a resource that is not there.  Others are the course of things."""
STUCK_SHARE = 4
"""A process in which more than one in so many of its slots' worth of agents are stuck asks to be replaced."""
HOPELESS_FAILURES = 64
"""Failures in a row without one finished episode after which the agent is taken to be broken."""


class Runner:
    """Runs one agent on one event loop until the server says stop, or :meth:`stop` is called."""

    def __init__(
        self,
        swarm: AsyncSwarm | AsyncTeam,
        agent: Agent | AsyncAgentFunction | SyncAgentFunction,
        concurrency: int = 16,
        *,
        options: RunnerOptions | None = None,
        on_begin: Callable[[Lease, Episode | TeamEpisode], None] | None = None,
        on_end: Callable[[EpisodeEnd], None] | None = None,
        on_stuck: Callable[[str], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """``on_stuck`` is told, once, why this process should be replaced by a fresh one: agents that do not end,
        or too much memory."""
        if concurrency < 1:
            raise RequestError(f"expected a concurrency of at least 1, got {concurrency}", param="concurrency")
        self._swarm = swarm
        self._agent = agent if isinstance(agent, Agent) else Agent(agent)
        self._concurrency = concurrency
        self._options = options or RunnerOptions()
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_stuck = on_stuck
        limit_s = self._options.episode_timeout_s
        self._leave_by = 0.0
        """When running episodes are aborted, once it stops."""
        self._instance = uuid.uuid4().hex[:12]
        self._deadline = None if limit_s is None else Deadline(limit_s, on_check=self._check_stuck)
        self._is_stuck = False
        self._clock = clock
        self._stats = RunnerStats()
        self._ready: deque[tuple[Lease, float]] = deque()
        """Leases with the time at which they lapse."""
        self._running: dict[asyncio.Task[EpisodeEnd], tuple[Lease, float]] = {}
        """Episodes with their lease and the time at which they began."""
        self._ids: dict[str, str] = {}
        """Of episodes that have begun, by lease."""
        self._beginning: set[str] = set()
        """Leases under which an episode is about to begin."""
        self._num_begun = 0
        self._mean_s: float | None = None
        self._changed = Changed()
        self._stopping = asyncio.Event()
        self._last_error = ""
        self._last_reason = ""
        self._hopeless = ""

    @property
    def stats(self) -> RunnerStats:
        return self._stats

    @property
    def num_running(self) -> int:
        return len(self._running)

    def stop(self, *, now: bool = False, grace_s: float | None = None) -> None:
        """Begin nothing new and give running episodes ``grace_s`` from now on; with ``now`` abort them at once.

        ``grace_s`` None is that of the options.  May be called again, to change it.  From the runner's own loop.
        """
        self._leave_by = self._clock() + (self._options.grace_s if grace_s is None else grace_s)
        self._stopping.set()
        self._changed.notify()
        if now:
            for task in self._running:
                task.cancel()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> RunnerStats:
        """Lease and run until told to stop.

        A server that is away is waited for.  Raises what makes further leases pointless, such as
        AuthenticationError, and SetupError for an agent that fails in every episode.
        """
        leasing = asyncio.create_task(self._lease_loop(), name="wingbeat-lease")
        stopping = asyncio.create_task(self._stopping.wait(), name="wingbeat-stop")
        try:
            await asyncio.wait({leasing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not self.stopping:
                self.stop()
        finally:
            self._stopping.set()
            leasing.cancel()
            stopping.cancel()
            await asyncio.wait({leasing, stopping})
            leaving = asyncio.create_task(self._leave(), name="wingbeat-leave")
            await self._drain()
            await leaving
        if not leasing.cancelled() and (error := leasing.exception()) is not None:
            raise error
        if self._hopeless:
            raise SetupError(
                f"the agent failed in all of its first {self._stats.num_failed} episodes; the last: {self._hopeless}."
                " The log has the traceback"
            )
        return self._stats

    async def _leave(self) -> None:
        """Give back what was not begun: others take it at once, and no group waits for this version of the agent."""
        left = [lease for lease, _ in self._ready]
        self._ready.clear()
        while self._beginning:  # their leases are still needed
            await self._changed.wait()
        try:
            await self._swarm.release(left, leaving=True, **self._version())
        except WingbeatError as error:
            logger.debug("leases were not given back, and lapse: %s", error.message)

    def _version(self) -> AgentVersion:
        return {"label": self._options.label, "code": self._agent.code.digest, "instance": self._instance}

    async def _drain(self) -> None:
        """Wait for what runs until ``_leave_by``, which may move meanwhile; then abort it."""
        while self._running and (left_s := self._leave_by - self._clock()) > 0:
            await self._changed.wait(left_s)
        left = tuple(self._running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_ABORT_S)

    # --- leasing

    async def _lease_loop(self) -> None:
        while True:
            while (want := self._num_wanted()) == 0:
                if self._num_left() == 0 and not self._running:
                    return
                await self._changed.wait()
            asked_at = self._clock()
            options = self._options
            sources = self._agent.sources if options.sources is None else options.sources
            reply = await self._swarm.lease(
                want, splits=options.splits, sources=sources, patient=True, **self._version()
            )
            self._take(reply)
            if reply.stop:
                logger.info("%s", reply.reason or "the run is complete")
                while self._ready:  # dealt out before the end: the server still counts on them, or refuses them
                    await self._changed.wait()
                return
            if not reply.leases and self._clock() - asked_at < _EMPTY_PAUSE_S:
                await asyncio.sleep(_EMPTY_PAUSE_S)

    def _num_wanted(self) -> int:
        """How many leases to ask for now; 0 while enough are at hand."""
        prefetch = self._num_prefetch()
        if len(self._ready) > prefetch // 2:
            return 0
        room = self._concurrency + prefetch - len(self._running) - len(self._ready)
        return max(0, min(room, self._num_left(), _MAX_LEASES))

    def _num_prefetch(self) -> int:
        """Slots expected to become free within the horizon (Little's law), at most all of them."""
        if self._mean_s is None:
            return 0
        return int(min(self._concurrency, _PREFETCH_HORIZON_S * self._concurrency / max(self._mean_s, 1e-3)))

    def _num_left(self) -> int:
        limit = self._options.max_episodes
        return _MAX_LEASES if limit is None else limit - self._num_begun - len(self._ready)

    def _take(self, reply: LeaseReply) -> None:
        now = self._clock()
        self._ready += [(lease, now + lease.expires_s) for lease in reply.leases]
        if not reply.leases and not reply.stop and reply.reason != self._last_reason:
            logger.info("no work yet: %s", reply.reason or "the server gave no reason")
        self._last_reason = "" if reply.leases else reply.reason
        self._fill()

    # --- running

    def _fill(self) -> None:
        while self._ready and len(self._running) < self._concurrency and not self.stopping:
            lease, lapses_at = self._ready.popleft()
            now = self._clock()
            if now >= lapses_at:
                self._stats = replace(self._stats, num_refused=self._stats.num_refused + 1)
                continue
            self._num_begun += 1
            self._beginning.add(lease.lease_id)
            task = asyncio.create_task(self._run_episode(lease), name=f"episode-{lease.lease_id}")
            self._running[task] = (lease, now)
            task.add_done_callback(self._on_done)

    async def _run_episode(self, lease: Lease) -> EpisodeEnd:
        started_at = self._clock()
        reward: float | None = None
        async with self._swarm.episode(lease=lease) as episode:
            self._begun(lease)
            self._ids[lease.lease_id] = episode.id
            if self._on_begin is not None:
                self._on_begin(lease, episode)
            result = await self._result_of(episode)
            if result is not None:
                rewards = result if isinstance(episode, TeamEpisode) else to_rewards(result)
                await episode.finish(rewards)
                reward = rewards if isinstance(rewards, float) else None
        error = "" if episode.state is EpisodeState.FINISHED else "the agent ended without finishing its episode"
        return EpisodeEnd(
            task_id=lease.task.id,
            split=lease.split,
            seconds=self._clock() - started_at,
            episode_id=episode.id,
            reward=reward,
            error=error,
            lease_id=lease.lease_id,
        )

    def _begun(self, lease: Lease) -> None:
        """Its episode has begun, or never will."""
        self._beginning.discard(lease.lease_id)
        self._changed.notify()

    async def _result_of(self, episode: Episode | TeamEpisode) -> RewardLike | None:
        """What the agent returns.  Raises EpisodeOverdue where it takes too long."""
        work = self._agent.run(episode)
        if self._deadline is None:
            return await work

        async def give_up(message: str) -> None:
            await episode.abort(message, outcome=Outcome.TIMEOUT, cause=Cause.AGENT_DEADLINE)

        return await self._deadline.run(work, give_up=give_up)

    def _check_stuck(self) -> None:
        """An agent did not end although its episode did: enough of them, and the process is not worth keeping."""
        num_stuck = self._agent.num_stuck + (self._deadline.num_stuck if self._deadline else 0)
        if num_stuck * STUCK_SHARE >= self._concurrency:
            self._ask_for_replacement(f"{num_stuck} agents run on although their episodes are over")

    def _check_memory(self) -> None:
        bound = self._options.max_memory_mb
        if bound is not None and not self._is_stuck and (held := memory_mb()) > bound:
            self._ask_for_replacement(f"the process holds {held:.0f} MiB, more than max_memory_mb = {bound}")

    def _ask_for_replacement(self, reason: str) -> None:
        if self._is_stuck:
            return
        self._is_stuck = True
        logger.warning("this process should be replaced: %s", reason)
        if self._on_stuck is not None:
            self._on_stuck(reason)

    def _on_done(self, task: asyncio.Task[EpisodeEnd]) -> None:
        lease, started_at = self._running.pop(task)
        self._begun(lease)
        episode_id = self._ids.pop(lease.lease_id, "")
        seconds = self._clock() - started_at
        self._mean_s = seconds if self._mean_s is None else self._mean_s + _MEAN_WEIGHT * (seconds - self._mean_s)
        self._check_memory()
        self._fill()
        self._changed.notify()
        if task.cancelled():
            end = _failed_end(lease, seconds, episode_id, "cancelled")
            self._stats = replace(self._stats, num_cancelled=self._stats.num_cancelled + 1)
        elif (error := task.exception()) is not None:
            end = _failed_end(lease, seconds, episode_id, _one_line(error))
            self._count_error(error, end)
        else:
            end = task.result()
            self._count_result(end)
        if self._on_end is not None:
            self._on_end(end)

    def _count_error(self, error: BaseException, end: EpisodeEnd) -> None:
        if isinstance(error, EpisodeOverdue):
            self._stats = replace(self._stats, num_timed_out=self._stats.num_timed_out + 1)
            logger.warning("task %s: %s", end.task_id, error.message)
            return
        if isinstance(error, WingbeatError) and not isinstance(error, RequestError):
            self._stats = replace(self._stats, num_refused=self._stats.num_refused + 1)
            is_news = isinstance(error, TELLING) and end.error != self._last_error
            logger.log(logging.WARNING if is_news else logging.INFO, "episode of task %s: %s", end.task_id, end.error)
            self._last_error = end.error
            return
        self._stats = replace(self._stats, num_failed=self._stats.num_failed + 1)
        if self._stats.num_finished == 0 and self._stats.num_failed >= HOPELESS_FAILURES and not self._hopeless:
            self._hopeless = end.error
            self.stop(now=True)
        if end.error == self._last_error:
            logger.warning("task %s: the agent failed again: %s", end.task_id, end.error)
        else:
            logger.warning("task %s: the agent failed\n%s", end.task_id, format_error(error).rstrip())
        self._last_error = end.error

    def _count_result(self, end: EpisodeEnd) -> None:
        stats = self._stats
        if end.error:
            self._stats = replace(stats, num_failed=stats.num_failed + 1)
            return
        self._stats = replace(stats, num_finished=stats.num_finished + 1)
        if end.reward is not None:
            self._stats = replace(
                self._stats, num_rewards=stats.num_rewards + 1, reward_sum=stats.reward_sum + end.reward
            )


def _failed_end(lease: Lease, seconds: float, episode_id: str, error: str) -> EpisodeEnd:
    return EpisodeEnd(
        task_id=lease.task.id,
        split=lease.split,
        seconds=seconds,
        episode_id=episode_id,
        error=error,
        lease_id=lease.lease_id,
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
