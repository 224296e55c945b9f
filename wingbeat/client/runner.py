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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wingbeat.client.agents import Agent, AsyncAgentFunction, SyncAgentFunction
from wingbeat.client.episode import EpisodeState, format_error
from wingbeat.client.rewards import to_rewards
from wingbeat.client.swarm import AsyncSwarm
from wingbeat.core.errors import RequestError, SetupError, WingbeatError
from wingbeat.core.ports import Clock
from wingbeat.core.protocol import Lease, LeaseReply
from wingbeat.core.types import Split

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
class EpisodeEnd:
    """How one episode ended, as this client saw it."""

    task_id: str
    split: Split
    seconds: float
    episode_id: str = ""
    """Empty where it ended before it had begun."""
    reward: float | None = None
    """None where it failed, or where the agent gave more than one number."""
    error: str = ""
    """One line; the server got the traceback."""


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """Counts since the start."""

    num_finished: int = 0
    num_failed: int = 0
    """The agent raised, or returned what is no reward."""
    num_refused: int = 0
    """The server was away or did not want the episode: a lapsed lease, a finish that came too late."""
    num_cancelled: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0

    @property
    def mean_reward(self) -> float | None:
        return self.reward_sum / self.num_rewards if self.num_rewards else None

    def __add__(self, other: RunnerStats) -> RunnerStats:
        return RunnerStats(
            num_finished=self.num_finished + other.num_finished,
            num_failed=self.num_failed + other.num_failed,
            num_refused=self.num_refused + other.num_refused,
            num_cancelled=self.num_cancelled + other.num_cancelled,
            num_rewards=self.num_rewards + other.num_rewards,
            reward_sum=self.reward_sum + other.reward_sum,
        )


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


HOPELESS_FAILURES = 64
"""Failures in a row without one finished episode after which the agent is taken to be broken."""


class Runner:
    """Runs one agent on one event loop until the server says stop, or :meth:`stop` is called."""

    def __init__(
        self,
        swarm: AsyncSwarm,
        agent: Agent | AsyncAgentFunction | SyncAgentFunction,
        concurrency: int = 16,
        *,
        options: RunnerOptions | None = None,
        on_end: Callable[[EpisodeEnd], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if concurrency < 1:
            raise RequestError(f"expected a concurrency of at least 1, got {concurrency}", param="concurrency")
        self._swarm = swarm
        self._agent = agent if isinstance(agent, Agent) else Agent(agent)
        self._concurrency = concurrency
        self._options = options or RunnerOptions()
        self._on_end = on_end
        self._clock = clock
        self._stats = RunnerStats()
        self._ready: deque[tuple[Lease, float]] = deque()
        """Leases with the time at which they lapse."""
        self._running: dict[asyncio.Task[EpisodeEnd], tuple[Lease, float]] = {}
        """Episodes with their lease and the time at which they began."""
        self._num_begun = 0
        self._mean_s: float | None = None
        self._changed = asyncio.Event()
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

    def stop(self, *, now: bool = False) -> None:
        """Begin nothing new and give running episodes ``grace_s``; with ``now`` abort them at once.

        From the runner's own loop.
        """
        self._stopping.set()
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
        grace_s = 0.0
        try:
            await asyncio.wait({leasing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            grace_s = self._options.grace_s
        finally:
            self._stopping.set()
            self._ready.clear()
            leasing.cancel()
            stopping.cancel()
            await asyncio.wait({leasing, stopping})
            await self._drain(grace_s)
        if not leasing.cancelled() and (error := leasing.exception()) is not None:
            raise error
        if self._hopeless:
            raise SetupError(
                f"the agent failed in all of its first {self._stats.num_failed} episodes; the last: {self._hopeless}."
                " The log has the traceback"
            )
        return self._stats

    async def _drain(self, grace_s: float) -> None:
        if self._running and grace_s > 0:
            await asyncio.wait(tuple(self._running), timeout=grace_s)
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
                await self._next_change()
            asked_at = self._clock()
            options = self._options
            sources = self._agent.sources if options.sources is None else options.sources
            reply = await self._swarm.lease(want, splits=options.splits, sources=sources, patient=True)
            self._take(reply)
            if reply.stop:
                logger.info("the run is complete%s", f": {reply.reason}" if reply.reason else "")
                while self._ready:  # dealt out before the end: the server still counts on them, or refuses them
                    await self._next_change()
                return
            if not reply.leases and self._clock() - asked_at < _EMPTY_PAUSE_S:
                await asyncio.sleep(_EMPTY_PAUSE_S)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

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
            task = asyncio.create_task(self._run_episode(lease), name=f"episode-{lease.lease_id}")
            self._running[task] = (lease, now)
            task.add_done_callback(self._on_done)

    async def _run_episode(self, lease: Lease) -> EpisodeEnd:
        started_at = self._clock()
        reward: float | None = None
        async with self._swarm.episode(lease=lease) as episode:
            result = await self._agent.run(episode)
            if result is not None:
                rewards = to_rewards(result)
                reward = rewards if isinstance(rewards, float) else None
                await episode.finish(rewards)
        error = "" if episode.state is EpisodeState.FINISHED else "the agent ended without finishing its episode"
        return EpisodeEnd(
            task_id=lease.task.id,
            split=lease.split,
            seconds=self._clock() - started_at,
            episode_id=episode.id,
            reward=reward,
            error=error,
        )

    def _on_done(self, task: asyncio.Task[EpisodeEnd]) -> None:
        lease, started_at = self._running.pop(task)
        seconds = self._clock() - started_at
        self._mean_s = seconds if self._mean_s is None else self._mean_s + _MEAN_WEIGHT * (seconds - self._mean_s)
        self._fill()
        self._changed.set()
        if task.cancelled():
            end = EpisodeEnd(task_id=lease.task.id, split=lease.split, seconds=seconds, error="cancelled")
            self._stats = replace(self._stats, num_cancelled=self._stats.num_cancelled + 1)
        elif (error := task.exception()) is not None:
            end = EpisodeEnd(task_id=lease.task.id, split=lease.split, seconds=seconds, error=_one_line(error))
            self._count_error(error, end)
        else:
            end = task.result()
            self._count_result(end)
        if self._on_end is not None:
            self._on_end(end)

    def _count_error(self, error: BaseException, end: EpisodeEnd) -> None:
        if isinstance(error, WingbeatError) and not isinstance(error, RequestError):
            self._stats = replace(self._stats, num_refused=self._stats.num_refused + 1)
            logger.info("episode of task %s: %s", end.task_id, end.error)
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


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
