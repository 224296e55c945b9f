"""What to run where: plain data that travels to other processes as JSON, never as a pickle."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from wingbeat.client.runner import RunnerOptions
from wingbeat.client.swarm import AsyncSwarm
from wingbeat.client.team import AsyncTeam


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Which agent runs where."""

    agent: str
    """``FILE.py`` or ``FILE.py:NAME``."""
    url: str = "http://127.0.0.1:8321"
    key: str | None = field(default=None, repr=False)
    concurrency: int = 16
    """Episodes at once in each process."""
    processes: int = 1
    options: RunnerOptions = field(default_factory=RunnerOptions)
    resources: str = ""
    """Import path ``MODULE:NAME`` of what makes each process's resource pool; "" for none."""
    log_level: int = logging.INFO
    """Of child processes; this process keeps its own."""
    servers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Several servers of one team, by name, the leading one first; {}: ``url`` alone."""
    keys: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Of servers of a team whose key is not ``key``."""
    journal: str = ""
    """Of a team: the folder that lets a successor end what a killed process had begun to finish."""
    watch: bool = False
    """Start new processes when the agent's files change, and let the old ones end their episodes."""
    drain_s: float = 300.0
    """How long the episodes of a process that was replaced may go on; nobody waits for them."""

    @property
    def is_managed(self) -> bool:
        """Whether the agent runs in child processes, which can be replaced, rather than here."""
        options = self.options
        return self.processes > 1 or self.watch or options.episode_timeout_s is not None or bool(options.max_memory_mb)

    def shares(self) -> list[RolloutPlan]:
        """One plan per process; ``max_episodes`` is divided among them."""
        limit = self.options.max_episodes
        if limit is None:
            return [self] * self.processes
        parts = [limit // self.processes + (i < limit % self.processes) for i in range(self.processes)]
        return [self.limited(part) for part in parts if part]

    def limited(self, max_episodes: int) -> RolloutPlan:
        """The same, for so many episodes."""
        return replace(self, options=replace(self.options, max_episodes=max_episodes))


_PLAN = TypeAdapter(RolloutPlan)


def dump_plan(plan: RolloutPlan) -> bytes:
    """One line."""
    return _PLAN.dump_json(plan)


def load_plan(line: bytes) -> RolloutPlan:
    return _PLAN.validate_json(line)


@contextlib.asynccontextmanager
async def connect(plan: RolloutPlan) -> AsyncGenerator[AsyncSwarm | AsyncTeam]:
    """The swarm of one process, or its team, with its resource pool."""
    async with contextlib.AsyncExitStack() as stack:
        pool = None
        if plan.resources:
            module, _, name = plan.resources.partition(":")
            pool = await stack.enter_async_context(getattr(importlib.import_module(module), name)())
        if not plan.servers:
            yield await stack.enter_async_context(AsyncSwarm(plan.url, plan.key, resources=pool))
            return
        swarms = {
            name: AsyncSwarm(url, plan.keys.get(name, plan.key), resources=pool) for name, url in plan.servers.items()
        }
        yield await stack.enter_async_context(AsyncTeam(swarms, journal=plan.journal or None))
