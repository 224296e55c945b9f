"""What to run where: plain data that travels to other processes as JSON, never as a pickle."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from wingbeat.client.agents import Agent, load_agent
from wingbeat.client.runner import RunnerOptions
from wingbeat.client.swarm import AsyncSwarm
from wingbeat.client.team import AsyncTeam
from wingbeat.core.errors import SetupError

AUTO = "auto"
ASK_TIMES = 30
ASK_EVERY_S = 1.0
LOOK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Which agent runs where."""

    agent: str
    """``FILE.py`` or ``FILE.py:NAME``; with a ``maker``, a name for people."""
    url: str = "http://127.0.0.1:8321"
    key: str | None = field(default=None, repr=False)
    concurrency: int = 16
    """Episodes at once in each process."""
    processes: int = 1
    options: RunnerOptions = field(default_factory=RunnerOptions)
    resources: str = ""
    """Import path ``MODULE:NAME`` of what makes a process's resource pool, given how many processes share the machine;
    "" for none."""
    resource_urls: tuple[str, ...] = ()
    """Resources servers for everything but in-process objects; ``auto`` for those that report to the server."""
    resource_key: str | None = field(default=None, repr=False)
    """Theirs; None: ``key``."""
    maker: str = ""
    """Import path ``MODULE:NAME`` of what makes the agent from ``settings``; "": it is the file ``agent``."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON data, for the maker."""
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


def plan_agent(plan: RolloutPlan) -> Agent:
    """The agent that a plan names.  Raises SetupError."""
    if not plan.maker:
        return load_agent(plan.agent)
    module, _, name = plan.maker.partition(":")
    return getattr(importlib.import_module(module), name)(plan.settings)


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
            make = getattr(importlib.import_module(module), name)
            urls = await resource_urls(plan)
            remote: dict[str, Any] = {"urls": urls, "key": plan.resource_key or plan.key} if urls else {}
            if AUTO in plan.resource_urls:
                remote["find"] = partial(_urls_now, plan)
            pool = await stack.enter_async_context(make(plan.processes, **remote))
        if not plan.servers:
            yield await stack.enter_async_context(AsyncSwarm(plan.url, plan.key, resources=pool))
            return
        swarms = {
            name: AsyncSwarm(url, plan.keys.get(name, plan.key), resources=pool) for name, url in plan.servers.items()
        }
        yield await stack.enter_async_context(AsyncTeam(swarms, journal=plan.journal or None))


async def resource_urls(plan: RolloutPlan) -> list[str]:
    """Where its resources servers are.  Raises SetupError where the server is asked and knows of none."""
    found = [url for url in plan.resource_urls if url != AUTO]
    if AUTO in plan.resource_urls:
        async with AsyncSwarm(*_leading(plan)) as swarm:
            known = await _announced(swarm)
        if not known:
            raise SetupError(
                f"no resources server reports to {swarm.url}: start `wingbeat resources --server {swarm.url}`, or name"
                " its address in place of auto"
            )
        found += [url for url in known if url not in found]
    return found


async def _urls_now(plan: RolloutPlan) -> list[str]:
    """The same for a client that works: one that begins anew may be at another address.  Raises WingbeatError."""
    named = [url for url in plan.resource_urls if url != AUTO]
    async with AsyncSwarm(*_leading(plan), timeout_s=LOOK_TIMEOUT_S, retry_budget_s=0.0) as swarm:
        return [*named, *(server.url for server in (await swarm.resource_servers()).servers)]


def _leading(plan: RolloutPlan) -> tuple[str, str | None]:
    """Address and key of the server that is asked, which is the first one of a team."""
    name = next(iter(plan.servers), "")
    return plan.servers.get(name, plan.url), plan.keys.get(name, plan.key)


async def _announced(swarm: AsyncSwarm) -> list[str]:
    """Those that report; one that was started with the server may take a moment."""
    for _ in range(ASK_TIMES):
        found = [server.url for server in (await swarm.resource_servers()).servers]
        if found:
            return found
        await asyncio.sleep(ASK_EVERY_S)
    return []
