"""The synchronous twins of AsyncSwarm and Episode, for plain scripts and threads.

All I/O runs on one event loop in a background thread; heartbeats have their own.

    with Swarm("http://127.0.0.1:8321") as swarm, swarm.episode(task=task) as episode:
        ...
        episode.finish(1.0)
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, SupportsFloat, TypeVar, Unpack

from wingbeat.client import model_clients
from wingbeat.client.episode import Episode, EpisodeState
from wingbeat.client.rewards import RewardLike
from wingbeat.client.swarm import AgentVersion, AsyncSwarm, BeginOptions, LeaseOptions
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.core.loop_thread import Blocking, LoopPort, LoopThread
from wingbeat.core.ports import ResourceLease, ResourcePool
from wingbeat.core.protocol import (
    EpisodeReply,
    EvaluationReply,
    EvaluationRequest,
    FinishReply,
    Lease,
    LeaseReply,
    MixingReply,
    PolicyReply,
    RemovedSourceReply,
    StatusReply,
    TaskSourceReply,
)
from wingbeat.core.protocol_deployment import DeploymentReply
from wingbeat.core.protocol_resources import ResourceServers
from wingbeat.core.protocol_variants import VariantsReply
from wingbeat.core.types import Cause, Group, Outcome, Split, Task

if TYPE_CHECKING:
    from openai import OpenAI

E = TypeVar("E", bound=Episode | TeamEpisode)


class EpisodeTwin(Generic[E]):
    """What the synchronous twins of an episode and of a team's episode have in common."""

    def __init__(self, episode: E, port: LoopPort) -> None:
        self._episode = episode
        self._port = port

    @property
    def id(self) -> str:
        return self._episode.id

    @property
    def attempt(self) -> int:
        return self._episode.attempt

    @property
    def task(self) -> Task:
        return self._episode.task

    @property
    def group(self) -> Group:
        return self._episode.group

    @property
    def split(self) -> Split:
        return self._episode.split

    @property
    def state(self) -> EpisodeState:
        return self._episode.state

    @property
    def closed(self) -> bool:
        return self._episode.closed

    def abort(self, message: str = "", *, outcome: Outcome = Outcome.CLIENT, cause: Cause | None = None) -> None:
        """As :meth:`Episode.abort`; that of a team ends on all servers."""
        self._port.call(self._episode.abort(message, outcome=outcome, cause=cause))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._port.call(self._episode.__aexit__(kind, error, tb))


class BlockingLease:
    """A held resource for synchronous code."""

    def __init__(self, lease: ResourceLease, spec: Any, port: LoopPort) -> None:
        self._lease = lease
        self._port = port
        self._is_local = spec.kind == "local"

    @property
    def name(self) -> str:
        return self._lease.name

    @property
    def value(self) -> Any:
        """What the back-end hands out; an object of this process comes as it is."""
        value = self._lease.value
        return value if self._is_local else Blocking(value, self._port)


class SyncEpisode(EpisodeTwin[Episode]):
    """:class:`wingbeat.client.Episode` for synchronous code; same names, same meaning."""

    @property
    def base_url(self) -> str:
        return self._episode.base_url

    @property
    def anthropic_base_url(self) -> str:
        return self._episode.anthropic_base_url

    @property
    def api_key(self) -> str:
        return self._episode.api_key

    def openai(self, **options: Any) -> OpenAI:
        """As :meth:`Episode.openai`, a synchronous client."""
        return model_clients.sync_openai(self.base_url, self.api_key, options)

    @property
    def policies(self) -> tuple[str, ...]:
        return self._episode.policies

    @property
    def model(self) -> str:
        return self._episode.model

    def model_for(self, policy: str | None = None, *, agent: str = "") -> str:
        """As :meth:`Episode.model_for`."""
        return self._episode.model_for(policy, agent=agent)

    def finish(
        self,
        reward: RewardLike,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        outcome: Outcome = Outcome.AGENT,
        message: str = "",
    ) -> FinishReply:
        """As :meth:`Episode.finish`."""
        return self._port.call(self._episode.finish(reward, metrics=metrics, outcome=outcome, message=message))

    def confirm(self) -> None:
        """As :meth:`Episode.confirm`."""
        self._port.call(self._episode.confirm())

    @contextmanager
    def lease(self, spec: Any, *, name: str = "", wait_s: float | None = None) -> Iterator[ResourceLease]:
        """As :meth:`Episode.lease`, with ``with``; the coroutine functions of its value are ordinary ones here."""
        with self._port.entered(self._episode.lease(spec, name=name, wait_s=wait_s)) as lease:
            yield BlockingLease(lease, spec, self._port)

    @contextmanager
    def lease_all(
        self, specs: Mapping[str, Any], *, wait_s: float | None = None
    ) -> Iterator[Mapping[str, ResourceLease]]:
        """As :meth:`Episode.lease_all`, with ``with``."""
        with self._port.entered(self._episode.lease_all(specs, wait_s=wait_s)) as leases:
            yield {name: BlockingLease(lease, specs[name], self._port) for name, lease in leases.items()}

    def prefetch(self, specs: Any) -> None:
        """As :meth:`Episode.prefetch`."""

        async def fetch() -> None:
            self._episode.prefetch(specs)

        self._port.call(fetch())

    def status(self) -> EpisodeReply:
        """As :meth:`Episode.status`."""
        return self._port.call(self._episode.status())


async def end_swarms(close: Callable[[], Awaitable[None]], swarms: Iterable[AsyncSwarm]) -> None:
    """Close what synchronous code used, and then its pools."""
    try:
        await close()
    finally:
        for pool in {id(swarm.resources): swarm.resources for swarm in swarms}.values():
            if pool is not None:
                await pool.close()


class Swarm:
    """:class:`wingbeat.client.AsyncSwarm` for synchronous code; usable from many threads.

    ``resources`` lives on the background loop, where nobody else could end it: ``close`` closes it, too.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8321",
        key: str | None = None,
        *,
        timeout_s: float = 60.0,
        retry_budget_s: float | None = 120.0,
        finish_budget_s: float | None = None,
        resources: ResourcePool | None = None,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        self._swarm = AsyncSwarm(
            url,
            key,
            timeout_s=timeout_s,
            retry_budget_s=retry_budget_s,
            finish_budget_s=finish_budget_s,
            resources=resources,
            ca=ca,
        )
        self._thread = LoopThread("wingbeat-client")
        self._port = self._thread.port

    @property
    def url(self) -> str:
        return self._swarm.url

    def close(self) -> None:
        """End connections, heartbeats, the resource pool and the background thread; twice is harmless."""
        self._thread.stop(end_swarms(self._swarm.close, [self._swarm]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def begin(self, **options: Unpack[BeginOptions]) -> SyncEpisode:
        """As :meth:`AsyncSwarm.begin`."""
        return SyncEpisode(self._port.call(self._swarm.begin(**options)), self._port)

    @contextmanager
    def episode(self, **options: Unpack[BeginOptions]) -> Generator[SyncEpisode]:
        """An episode for the block; leaving it without ``finish`` aborts the episode."""
        with self.begin(**options) as episode:
            yield episode

    def lease(self, max_leases: int = 1, **options: Unpack[LeaseOptions]) -> LeaseReply:
        """As :meth:`AsyncSwarm.lease`."""
        return self._port.call(self._swarm.lease(max_leases, **options))

    def release(self, leases: Iterable[Lease] = (), *, leaving: bool = False, **version: Unpack[AgentVersion]) -> int:
        """As :meth:`AsyncSwarm.release`."""
        return self._port.call(self._swarm.release(leases, leaving=leaving, **version))

    def variants(self) -> VariantsReply:
        """As :meth:`AsyncSwarm.variants`."""
        return self._port.call(self._swarm.variants())

    def resource_servers(self) -> ResourceServers:
        """As :meth:`AsyncSwarm.resource_servers`."""
        return self._port.call(self._swarm.resource_servers())

    def deployment(self) -> DeploymentReply:
        """As :meth:`AsyncSwarm.deployment`."""
        return self._port.call(self._swarm.deployment())

    def scale(self, *, engines: int) -> DeploymentReply:
        """As :meth:`AsyncSwarm.scale`."""
        return self._port.call(self._swarm.scale(engines=engines))

    def drain(self, engine: str, *, drain_s: float) -> None:
        """As :meth:`AsyncSwarm.drain`."""
        return self._port.call(self._swarm.drain(engine, drain_s=drain_s))

    def set_weights(self, weights: Mapping[str, float]) -> VariantsReply:
        """As :meth:`AsyncSwarm.set_weights`."""
        return self._port.call(self._swarm.set_weights(weights))

    def put_tasks(
        self, source: str, tasks: Iterable[Task], *, split: Split = Split.TRAIN, ratio: float | None = None
    ) -> TaskSourceReply:
        """As :meth:`AsyncSwarm.put_tasks`."""
        return self._port.call(self._swarm.put_tasks(source, tasks, split=split, ratio=ratio))

    def remove_tasks(self, source: str) -> RemovedSourceReply:
        """As :meth:`AsyncSwarm.remove_tasks`."""
        return self._port.call(self._swarm.remove_tasks(source))

    def mixing(self) -> MixingReply:
        """As :meth:`AsyncSwarm.mixing`."""
        return self._port.call(self._swarm.mixing())

    def set_mixing(self, ratios: Mapping[str, float]) -> MixingReply:
        """As :meth:`AsyncSwarm.set_mixing`."""
        return self._port.call(self._swarm.set_mixing(ratios))

    def status(self) -> StatusReply:
        """As :meth:`AsyncSwarm.status`."""
        return self._port.call(self._swarm.status())

    def policies(self) -> list[PolicyReply]:
        """As :meth:`AsyncSwarm.policies`."""
        return self._port.call(self._swarm.policies())

    def start_evaluation(self, request: EvaluationRequest) -> EvaluationReply:
        """As :meth:`AsyncSwarm.start_evaluation`."""
        return self._port.call(self._swarm.start_evaluation(request))

    def evaluation(self, evaluation_id: str) -> EvaluationReply:
        """As :meth:`AsyncSwarm.evaluation`."""
        return self._port.call(self._swarm.evaluation(evaluation_id))

    def evaluate(
        self,
        request: EvaluationRequest | None = None,
        *,
        poll_s: float = 1.0,
        on_progress: Callable[[EvaluationReply], None] | None = None,
    ) -> EvaluationReply:
        """As :meth:`AsyncSwarm.evaluate`; ``on_progress`` is called in the background thread."""
        return self._port.call(self._swarm.evaluate(request, poll_s=poll_s, on_progress=on_progress))

    def events(self) -> Iterator[dict[str, Any]]:
        """As :meth:`AsyncSwarm.events`."""
        stream = self._swarm.events()
        try:
            while (event := self._port.call(_next(stream))) is not None:
                yield event
        finally:
            self._port.call(stream.aclose())

    def stop(self) -> None:
        """As :meth:`AsyncSwarm.stop`."""
        self._port.call(self._swarm.stop())


async def _next(stream: AsyncGenerator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(stream, None)
