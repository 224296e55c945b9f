"""The synchronous twins of AsyncTeam and TeamEpisode.

with Team({"east": "https://east.example:8321", "west": "https://west.example:8321"}) as team:
    with team.episode(task=task) as episode:
        ...
        episode.finish(1.0)
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, Unpack

from wingbeat.client.episode import Episode
from wingbeat.client.rewards import RewardLike
from wingbeat.client.swarm import AsyncSwarm, LeaseOptions
from wingbeat.client.sync import EpisodeTwin, SyncEpisode, end_swarms
from wingbeat.client.team import AsyncTeam, TeamBeginOptions
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.core.loop_thread import LoopPort, LoopThread
from wingbeat.core.ports import ResourceLease
from wingbeat.core.protocol import FinishReply, LeaseReply
from wingbeat.core.types import Outcome


class SyncTeamEpisode(EpisodeTwin[TeamEpisode]):
    """:class:`TeamEpisode` for synchronous code; same names, same meaning."""

    def __getitem__(self, server: str) -> SyncEpisode:
        return SyncEpisode(self._episode[server], self._port)

    @property
    def servers(self) -> tuple[str, ...]:
        return self._episode.servers

    @property
    def lead(self) -> SyncEpisode:
        return SyncEpisode(self._episode.lead, self._port)

    def finish(
        self,
        reward: RewardLike,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        outcome: Outcome = Outcome.AGENT,
        message: str = "",
    ) -> dict[str, FinishReply]:
        """As :meth:`TeamEpisode.finish`."""
        return self._port.call(self._episode.finish(reward, metrics=metrics, outcome=outcome, message=message))

    def lease(self, spec: Any, *, name: str = "", wait_s: float | None = None) -> AbstractContextManager[ResourceLease]:
        """As :meth:`TeamEpisode.lease`, with ``with``."""
        return self.lead.lease(spec, name=name, wait_s=wait_s)

    def lease_all(
        self, specs: Mapping[str, Any], *, wait_s: float | None = None
    ) -> AbstractContextManager[Mapping[str, ResourceLease]]:
        """As :meth:`TeamEpisode.lease_all`, with ``with``."""
        return self.lead.lease_all(specs, wait_s=wait_s)

    def prefetch(self, specs: Any) -> None:
        """As :meth:`TeamEpisode.prefetch`."""
        self.lead.prefetch(specs)


class Team:
    """:class:`AsyncTeam` for synchronous code; usable from many threads.

    Resource pools of its swarms live on the background loop: ``close`` closes them, too.
    """

    def __init__(
        self,
        servers: Mapping[str, AsyncSwarm | str],
        *,
        lead: str | None = None,
        key: str | None = None,
        journal: Path | str | None = None,
        prepare_budget_s: float = 240.0,
    ) -> None:
        self._team = AsyncTeam(servers, lead=lead, key=key, journal=journal, prepare_budget_s=prepare_budget_s)
        self._thread = LoopThread("wingbeat-client")
        self._port = self._thread.port

    def close(self) -> None:
        """As :meth:`AsyncTeam.close`; and the swarms' resource pools."""
        self._thread.stop(end_swarms(self._team.close, self._team.swarms.values()))

    def __enter__(self) -> Self:
        self._port.call(self._team.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def lease(self, max_leases: int = 1, **options: Unpack[LeaseOptions]) -> LeaseReply:
        """As :meth:`AsyncTeam.lease`."""
        return self._port.call(self._team.lease(max_leases, **options))

    def begin(self, **options: Unpack[TeamBeginOptions]) -> SyncTeamEpisode:
        """As :meth:`AsyncTeam.begin`."""
        return SyncTeamEpisode(self._port.call(self._team.begin(**options)), self._port)

    @contextmanager
    def episode(self, **options: Unpack[TeamBeginOptions]) -> Generator[SyncTeamEpisode]:
        """An episode for the block; leaving it without ``finish`` aborts the episode on all servers."""
        with self.begin(**options) as episode:
            yield episode


def synchronous(episode: Episode | TeamEpisode, port: LoopPort) -> SyncEpisode | SyncTeamEpisode:
    """What a synchronous agent gets."""
    if isinstance(episode, TeamEpisode):
        return SyncTeamEpisode(episode, port)
    return SyncEpisode(episode, port)
