"""The tools of an agent, and what they hold for one episode.

toolbox = Toolbox([add, Notebook, shell_tool(SandboxSpec())])       # once, at module level

async with toolbox.for_episode(episode) as tools:                   # leases, and an instance of each class
    reply = await client.chat.completions.create(..., tools=tools.schemas())
    messages += await tools.answer(reply.choices[0].message.tool_calls)
    reward = await score(tools.lease("box").value)                  # the very box that the agent used
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from wingbeat.core.errors import ConfigError
from wingbeat.core.ports import ResourceLease, ResourcePool
from wingbeat.resources import Spec
from wingbeat.tools.arguments import shown
from wingbeat.tools.calling import Caller, Sleep, Threads
from wingbeat.tools.calls import ToolCall, read_call
from wingbeat.tools.results import Fault, ToolRefused, ToolResult, failed
from wingbeat.tools.tool import Tool, methods_of, needs_of

ToolLike = Tool | type | Any
"""A tool, a class with tools (an instance of it for each episode), or an instance (one for all episodes)."""


class Leases(Protocol):
    """What tools need of an episode."""

    def lease_all(self, specs: Mapping[str, Any]) -> AbstractAsyncContextManager[Mapping[str, ResourceLease]]: ...


class Toolbox:
    """Tools by name.  ``max_threads`` bounds the synchronous ones that run at once.

    Raises ToolRefused for two tools of one name, and for two different specs of one resource's name.
    """

    def __init__(
        self,
        tools: Iterable[ToolLike],
        *,
        max_threads: int = 32,
        sleep: Sleep = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        if max_threads < 1:
            raise ToolRefused(f"max_threads: expected at least 1, got {max_threads}")
        self._parts = tuple(tools)
        self._tools = _by_name(self._parts)
        self._caller = Caller(threads=Threads(max_threads), sleep=sleep, rng=rng)
        self._server = ""
        self.resources = _resources_of(self._parts, self._tools.values())
        """Name -> spec: what an episode leases."""

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """For ``tools`` of OpenAI's API, in the order in which they were given."""
        return [tool.schema for tool in self]

    async def call(self, name: str, arguments: str | Mapping[str, Any] = "") -> ToolResult:
        """Call one tool with a model's arguments (JSON text).

        What the model did wrong is a result with ``is_error``.  Raises ResourceFailed and Wingbeat's other errors for
        what it could do nothing about, ConfigError for a tool that needs an episode and has none.
        """
        tool = self._tools.get(name)
        if tool is None:
            return failed(Fault.UNKNOWN_TOOL, f"there is no tool {shown(name)}; the tools are {', '.join(self.names)}")
        if tool.needs_episode:
            raise ConfigError(
                f"tool {name}: expected `async with toolbox.for_episode(episode) as tools` around its calls"
            )
        return await self._caller.call(tool, arguments, server=self._server)

    async def call_all(self, tool_calls: Iterable[Any] | None) -> list[ToolResult]:
        """The results of one turn's tool calls, in their order; they run at once.

        Those that share state (methods of one instance, tools on one box) run one after another, in their order.
        Takes the tool calls of OpenAI's SDK, or dictionaries like them.  If one fails through infrastructure the
        others are cancelled and its error is raised.
        """
        calls = [read_call(call) for call in tool_calls or ()]
        before: dict[int, asyncio.Task[ToolResult]] = {}
        tasks: list[asyncio.Task[ToolResult]] = []
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for call in calls:
                    keys = self._state_of(call)
                    earlier = [before[key] for key in keys if key in before]
                    task = group.create_task(self._after(earlier, call), name=f"tool {call.name}")
                    before |= dict.fromkeys(keys, task)
                    tasks.append(task)
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
        if failure is not None:
            raise failure
        return [task.result() for task in tasks]

    async def answer(self, tool_calls: Iterable[Any] | None) -> list[dict[str, Any]]:
        """The ``role: tool`` messages that answer one turn's tool calls; else as :meth:`call_all`."""
        return [result.message for result in await self.call_all(tool_calls)]

    @asynccontextmanager
    async def for_episode(self, episode: Leases) -> AsyncGenerator[EpisodeTools, None]:
        """These tools with what they need for one episode: leased resources, an instance of each class.

        All resources are leased at the beginning, all or none, and belong to the episode, so that ``episode.lease`` of
        the same spec and name is the same resource.  Raises ResourceFailed where one is not to be had.
        """
        async with AsyncExitStack() as stack:
            leases: Mapping[str, ResourceLease] = {}
            if self.resources:
                leases = await stack.enter_async_context(episode.lease_all(self.resources))
            values = {name: lease.value for name, lease in leases.items()}
            parts = [await _part_for(stack, part, values, episode) for part in self._parts]
            yield EpisodeTools(self, [tool for part in parts for tool in part], leases, episode)

    def for_owner(self, pool: ResourcePool, owner: str) -> AbstractAsyncContextManager[EpisodeTools]:
        """As :meth:`for_episode` without one: in tests, scripts and services."""
        return self.for_episode(_Owner(pool, owner))

    def _state_of(self, call: ToolCall) -> list[int]:
        tool = self._tools.get(call.name)
        return [id(part) for part in tool.state] if tool is not None and tool.options.in_order else []

    async def _after(self, earlier: Sequence[asyncio.Task[ToolResult]], call: ToolCall) -> ToolResult:
        if earlier:
            await asyncio.wait(earlier)
        if call.fault:
            return replace(failed(Fault.ARGUMENTS, call.fault), call_id=call.id)
        return replace(await self.call(call.name, call.arguments), call_id=call.id)


class EpisodeTools(Toolbox):
    """A toolbox during one episode; made by :meth:`Toolbox.for_episode`."""

    def __init__(
        self, toolbox: Toolbox, tools: Sequence[Tool], leases: Mapping[str, ResourceLease], episode: Leases
    ) -> None:
        self._parts = tuple(tools)
        self._tools = {tool.name: tool for tool in tools}
        self._caller = toolbox._caller
        self._server = str(getattr(episode, "base_url", ""))
        self._leases = leases
        self.resources = MappingProxyType({})

    def lease(self, name: str) -> ResourceLease:
        """What is held under a name; its ``value`` is the box, the endpoint, the object.  Raises ConfigError."""
        held = self._leases.get(name)
        if held is None:
            known = ", ".join(self._leases) or "it has none"
            raise ConfigError(f"expected one of the toolbox's resources ({known}), got {name!r}")
        return held


@dataclass(frozen=True, slots=True)
class _Owner:
    """Leases for somebody who is no episode."""

    pool: ResourcePool
    owner: str

    def lease_all(self, specs: Mapping[str, Any]) -> AbstractAsyncContextManager[Mapping[str, ResourceLease]]:
        return self.pool.lease_all(specs, owner=self.owner)


def _by_name(parts: Sequence[ToolLike]) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for part in parts:
        for tool in _tools_of(part):
            if tool.name in tools:
                raise ToolRefused(
                    f"two tools are called {tool.name!r}: give one another name, with @tool(name=...),"
                    " tool.renamed(...) or the prefix of mcp_tools(...)"
                )
            tools[tool.name] = tool
    return tools


def _tools_of(part: ToolLike) -> Sequence[Tool]:
    if isinstance(part, Tool):
        return (part,)
    methods = methods_of(part if isinstance(part, type) else type(part))
    if not methods:
        hint = "; decorate it with @tool" if callable(part) else ""
        raise ToolRefused(f"expected tools, or classes or objects with tools, got {part!r}{hint}")
    return methods if isinstance(part, type) else [method.bound(part) for method in methods]


def _resources_of(parts: Sequence[ToolLike], tools: Iterable[Tool]) -> Mapping[str, Spec]:
    needed = [(tool.name, tool.resources) for tool in tools]
    needed += [(part.__name__, needs_of(part).resources) for part in parts if isinstance(part, type)]
    specs: dict[str, Spec] = {}
    for who, resources in needed:
        for name, spec in resources.items():
            if specs.setdefault(name, spec).key != spec.key:
                raise ToolRefused(
                    f"{who}: the resource {name!r} is declared with two different specs: use one, or two names"
                )
    return MappingProxyType(specs)


async def _part_for(stack: AsyncExitStack, part: ToolLike, values: Mapping[str, Any], episode: Any) -> list[Tool]:
    """A part's tools with all they need."""
    if not isinstance(part, type):
        return [tool.filled(values, episode) for tool in _tools_of(part)]
    needs = needs_of(part)
    held = {name: values[name] for name in needs.resources}
    instance = part(**held, **dict.fromkeys(needs.episode_parameters, episode))
    if isinstance(instance, AbstractAsyncContextManager):
        await stack.enter_async_context(instance)
    elif isinstance(instance, AbstractContextManager):
        stack.enter_context(instance)
    return [tool.bound(instance, *held.values()).filled(values, episode) for tool in methods_of(part)]
