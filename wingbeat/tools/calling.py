"""One call of one tool: its arguments, its time, its tries, and whose fault its end is.

A policy learns from what it reads, so what it did wrong must reach it, and what it could not know must not: a dead
sandbox told as an observation would teach it to avoid the sandbox. The rule:

* wrong arguments, ``ToolError``, any exception of the tool's own code, its time-out: an observation;
* every error of Wingbeat's own (ResourceFailed and the rest), what came of one (``__cause__``, ``__context__``), a
  failure of the server that the tool's own model calls went to, and the types that the tool's author lists as
  ``infrastructure``: raised, after ``retries`` where the error says that trying again can help.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import random
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from wingbeat.client.agents import run_in_thread
from wingbeat.client.blame import explain_failure
from wingbeat.client.retry import RetryPolicy
from wingbeat.core.errors import WingbeatError
from wingbeat.core.types import Cause
from wingbeat.tools.arguments import ArgumentsRejected
from wingbeat.tools.results import Fault, ToolError, ToolResult, ToolUnavailable, failed, shortened, to_result
from wingbeat.tools.tool import Tool

logger = logging.getLogger("wingbeat.tools")

_BACKOFF = RetryPolicy(budget_s=None, base_s=0.5, cap_s=10.0)

Sleep = Callable[[float], Awaitable[None]]


class Threads:
    """Runs synchronous tools, at most ``max_threads`` at once; further calls wait their turn.

    Nothing can end a thread: one whose call timed out keeps its place until it ends by itself, so that tools which
    hang use up their places and not the machine.
    """

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._abandoned: set[threading.Thread] = set()

    async def run(self, tool: Tool, function: Callable[[], Any], timeout_s: float | None) -> Any:
        """What the function returns; ``timeout_s`` counts from when it has its place.

        Raises ToolUnavailable if no place becomes free for that long, _OutOfTime if the function takes longer.
        """
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self.max_threads))
        try:
            async with asyncio.timeout(timeout_s):
                await places.acquire()
        except TimeoutError as error:
            raise ToolUnavailable(
                f"tool {tool.name}: all {self.max_threads} threads for synchronous tools were busy for {timeout_s} s;"
                f" {self.num_stuck} of them run calls that timed out before"
            ) from error

        has_begun = False

        def work() -> Any:
            nonlocal has_begun
            has_begun = True
            try:
                return function()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for a place any more
                    loop.call_soon_threadsafe(places.release)

        try:
            async with _within(timeout_s):
                return await run_in_thread(work, name=f"wingbeat-tool-{tool.name}", abandoned=self._abandoned)
        except RuntimeError as error:
            if has_begun:
                raise
            places.release()
            raise ToolUnavailable(f"tool {tool.name}: no thread could be started: {error}") from error

    @property
    def num_stuck(self) -> int:
        """Threads that still run although nobody waits for them any more."""
        self._abandoned.difference_update([thread for thread in self._abandoned if not thread.is_alive()])
        return len(self._abandoned)


class Caller:
    """Calls tools; ``sleep`` and ``rng`` are those of the waits between tries."""

    def __init__(self, *, threads: Threads, sleep: Sleep = asyncio.sleep, rng: random.Random | None = None) -> None:
        self._threads = threads
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._warned: set[tuple[str, type[BaseException]]] = set()

    async def call(self, tool: Tool, given: str | Mapping[str, Any], *, server: str) -> ToolResult:
        """The result as the model may read it.  Raises what is infrastructure's fault (see above).

        ``server`` is where model calls of the episode go.
        """
        try:
            arguments = tool.arguments.read(given)
        except ArgumentsRejected as error:
            return shortened(
                failed(Fault.ARGUMENTS, f"wrong arguments for {tool.name}\n{error}"),
                limit=tool.options.max_output_chars,
            )
        attempt = 0
        while True:
            try:
                result = await self._try(tool, arguments, server)
                return shortened(result, limit=tool.options.max_output_chars)
            except WingbeatError as error:
                if attempt >= tool.options.retries or not error.retryable:
                    raise
                wait = getattr(error, "retry_after_s", None)
                delay = _BACKOFF.delay_s(attempt, elapsed_s=0.0, retry_after_s=wait, rng=self._rng)
                logger.info("tool %s: try %d failed (%s); again in %.1f s", tool.name, attempt + 1, error, delay)
                await self._sleep(delay or 0.0)
            attempt += 1

    async def _try(self, tool: Tool, arguments: dict[str, Any], server: str) -> ToolResult:
        try:
            return to_result(await self._run(tool, arguments))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # we are cancelled; else something inside the tool was
            return self._observation(tool, error)
        except ToolError as error:
            return failed(Fault.RAISED, str(error) or "the tool refused, and did not say why")
        except BaseException as error:  # a tool's own code may raise anything, sys.exit() too
            if isinstance(error, WingbeatError) or _is_servers_fault(error, server):
                raise
            if isinstance(error, tool.options.infrastructure):
                raise ToolUnavailable(f"tool {tool.name}: {type(error).__name__}: {error}") from error
            return self._observation(tool, error)

    async def _run(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        function = functools.partial(tool.function, **arguments)
        timeout_s = tool.options.timeout_s
        if inspect.iscoroutinefunction(_innermost(tool.function)):
            async with _within(timeout_s):
                return await function()
        returned = await self._threads.run(tool, function, timeout_s)
        if inspect.isawaitable(returned):
            async with _within(timeout_s):
                return await returned
        return returned

    def _observation(self, tool: Tool, error: BaseException) -> ToolResult:
        """Of an exception; the first of its kind is logged whole, since it may be a bug of the tool's."""
        if isinstance(error, _OutOfTime):
            return failed(Fault.TIMEOUT, str(error))
        kind = (tool.name, type(error))
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("tool %s raised; the model reads it (told once a kind)", tool.name, exc_info=error)
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return failed(Fault.RAISED, words)


class _OutOfTime(TimeoutError):
    """The time of a call is over; a TimeoutError of the tool's own code is another thing."""


@contextlib.asynccontextmanager
async def _within(timeout_s: float | None) -> AsyncGenerator[None, None]:
    """Raises _OutOfTime where the time is over, and lets a TimeoutError from inside through."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise _OutOfTime(f"the tool did not end within {timeout_s:g} s") from error
        raise


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_servers_fault(error: BaseException, server: str) -> bool:
    return explain_failure(error, server=server)[0] is Cause.INFRASTRUCTURE_ERROR
