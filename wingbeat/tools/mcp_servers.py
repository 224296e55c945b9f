"""Tools of MCP servers, through the official ``mcp`` package.

    async with mcp_tools(command=["uvx", "mcp-server-git"], prefix="git_") as tools:
        toolbox = Toolbox([*tools])

What a server says about a call (wrong arguments, a tool that failed) is an observation. A server that died, or that
answers nothing any more, is infrastructure's fault: ResourceLost, with the last lines of its standard error. Whether a
call is slow or its server is gone is found out by asking it for its tools.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.resources import ResourceFailed, ResourceLost
from wingbeat.tools.mcp_links import Link, McpTarget, bare
from wingbeat.tools.results import Fault, ToolError, ToolRefused, ToolResult, failed
from wingbeat.tools.tool import Tool, ToolOptions

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as McpTool

logger = logging.getLogger("wingbeat.tools")

MAX_PAGES = 100
"""Of a server's list of tools."""
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


@asynccontextmanager
async def mcp_tools(
    *,
    command: Sequence[str] = (),
    url: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    headers: Mapping[str, str] | None = None,
    prefix: str = "",
    only: Collection[str] = (),
    timeout_s: float = 60.0,
    start_timeout_s: float = 30.0,
    restarts: int = 0,
    max_output_chars: int = 20_000,
) -> AsyncGenerator[list[Tool], None]:
    """The tools of one MCP server, for as long as the block lasts; of the event loop that entered it.

    ``command`` starts a server that speaks over its standard input and output, with ``env`` added to a few harmless
    variables of this process; ``url`` is one that serves streamable HTTP, asked with ``headers``.  ``prefix`` goes
    before every name; ``only`` names those that are wanted (without the prefix; () all).  ``restarts`` is how often a
    server that was lost is started again; the call that found out is then made once more, so allow it only where a
    call may be repeated and the server keeps nothing that matters.

    Raises DependencyMissing without the extra ``mcp``, ConfigError for contradictory options, ToolRefused for names
    that clash or are missing, ResourceFailed if the server does not start.
    """
    if timeout_s <= 0 or start_timeout_s <= 0 or restarts < 0:
        raise ConfigError("mcp_tools: expected timeouts above 0 and restarts of 0 or more")
    target = _target(command, url, env, cwd, headers)
    options = ToolOptions(timeout_s=None, max_output_chars=max_output_chars)  # the server's own limit is timeout_s
    async with _Server(target, timeout_s, start_timeout_s, restarts) as server:
        listed = await server.list_tools()
        if missing := sorted(set(only) - {each.name for each in listed}):
            known = ", ".join(each.name for each in listed) or "none"
            raise ToolRefused(f"only: {target.title} has no tool {', '.join(missing)}; it has {known}")
        chosen = [each for each in listed if not only or each.name in only]
        yield _tools(chosen, server.call, prefix=prefix, options=options, title=target.title)


class _Server:
    """A server that may be started again; calls come from any task of its loop."""

    def __init__(self, target: McpTarget, timeout_s: float, start_timeout_s: float, restarts: int) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._restarts_left = restarts
        self._may_repeat = restarts > 0
        self._link: Link | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._words = ""
        """Why the last link was lost."""

    async def __aenter__(self) -> _Server:
        self._link = await Link.open(self._target, timeout_s=self._start_timeout_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        async with self._lock:
            if self._link is not None:
                await self._link.close()
                self._link = None

    async def list_tools(self) -> list[McpTool]:
        assert self._link is not None
        found: list[McpTool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    page = await self._link.client.list_tools(cursor=cursor)
            except (TimeoutError, ValidationError, RuntimeError, *self._link.faults) as error:
                raise ResourceFailed(await self._link.explain(f"does not list its tools ({error!r})")) from error
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ResourceFailed(f"{self._target.title} lists its tools on more than {MAX_PAGES} pages")

    async def call(self, name: str, /, **arguments: Any) -> ToolResult:
        """An argument may be called ``name``, too.  Raises ResourceLost if the server is gone."""
        link = await self._current()
        try:
            return await self._ask(link, name, arguments)
        except ResourceLost:
            if not self._may_repeat:
                raise
        return await self._ask(await self._current(), name, arguments)

    async def _ask(self, link: Link, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS, REQUEST_TIMEOUT

        try:
            result = await link.client.call_tool(name, arguments, read_timeout_seconds=self._timeout_s)
        except (ValidationError, RuntimeError) as error:
            raise ResourceFailed(
                f"{self._target.title} answered {name} against the protocol: {bare(str(error))}"
            ) from error
        except link.faults as error:
            code = error.code if isinstance(error, MCPError) else None
            if code == INVALID_PARAMS or await link.answers(call_s=self._timeout_s):
                if code == REQUEST_TIMEOUT:
                    return failed(Fault.TIMEOUT, f"the tool did not end within {self._timeout_s:g} s")
                raise ToolError(error.message if isinstance(error, MCPError) else bare(str(error))) from None
            await self._drop(link, "does not answer any more" if code == REQUEST_TIMEOUT else "is gone")
            raise ResourceLost(self._words) from error
        return _result_of(result)

    async def _current(self) -> Link:
        async with self._lock:
            if self._closed:
                raise ConfigError(f"{self._target.title}: its `async with mcp_tools(...)` block has ended")
            if self._link is None:
                if not self._restarts_left:
                    raise ResourceLost(self._words)
                self._restarts_left -= 1
                logger.warning("%s; it is started again", self._words)
                self._link = await Link.open(self._target, timeout_s=self._start_timeout_s)
            return self._link

    async def _drop(self, link: Link, what: str) -> None:
        """Once for each link, however many calls find it lost."""
        async with self._lock:
            if self._link is link:
                self._link = None
                self._words = f"{self._target.title} {what}"  # should this call be cancelled in the next line
                await link.close()
                self._words = await link.explain(what)


def _target(
    command: Sequence[str], url: str, env: Mapping[str, str] | None, cwd: str, headers: Mapping[str, str] | None
) -> McpTarget:
    if bool(command) == bool(url):
        raise ConfigError("mcp_tools: expected either a command or a url")
    if isinstance(command, str):
        raise ConfigError(f"mcp_tools: expected the command as a list of words, got the text {command!r}")
    if url and (env or cwd):
        raise ConfigError("mcp_tools: env and cwd are for a server that is started by its command, got them with a url")
    if command and headers:
        raise ConfigError("mcp_tools: headers are for a server with a url, got them with a command")
    try:
        import mcp  # noqa: F401 (told before anything is started)
    except ModuleNotFoundError as error:
        raise DependencyMissing("MCP servers need the official package: pip install 'wingbeat[mcp]'") from error
    return McpTarget(tuple(command), url, dict(env or {}), cwd, dict(headers or {}))


def _tools(
    listed: Sequence[McpTool], call: Callable[..., Any], *, prefix: str, options: ToolOptions, title: str
) -> list[Tool]:
    """As ours, under names that OpenAI's API takes.  Raises ToolRefused for two of one name."""
    tools: dict[str, Tool] = {}
    for each in listed:
        name = prefix + _NO_NAME.sub("_", each.name)
        if name in tools:
            raise ToolRefused(f"{title}: two of its tools would be called {name!r}; choose with only=[...]")
        tools[name] = Tool.of_schema(
            partial(call, each.name),
            name=name,
            description=each.description or each.title or "",
            parameters=each.input_schema,
            options=options,
        )
    return list(tools.values())


def _result_of(result: CallToolResult) -> ToolResult:
    """Text as it is; what is no text is named."""
    parts = [_words_of(block) for block in result.content]
    data = result.content if result.structured_content is None else result.structured_content
    fault = Fault.RAISED if result.is_error else None
    return ToolResult("\n".join(parts), is_error=result.is_error, data=data, fault=fault)


def _words_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if isinstance(text, str) else f"[resource {block.resource.uri}]"
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    return f"[{block.type} {getattr(block, 'mime_type', '')}]"
