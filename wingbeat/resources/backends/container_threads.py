"""Blocking calls of client libraries, in daemon threads: none can keep the process from ending.

A thread of its own for each call: a command holds one for as long as it runs, and a pool with a number of threads would
be a limit on commands that nobody set.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """The calls of one back-end; of one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cleaning: set[asyncio.Future[Any]] = set()

    def begin(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call it in a thread; the future is of the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(_look)

        def settle(end: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                end(value)

        def work() -> None:
            try:
                ended, value = future.set_result, function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - it is raised where the call is awaited
                ended, value = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(settle, ended, value)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Its result.  A caller that is cancelled is not kept waiting; the call goes on in its thread."""
        return await asyncio.shield(self.begin(function, *args, **kwargs))

    def clean(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Have something done that its caller need not wait for; :meth:`close` does."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}-cleanup")
        self._keep(task)
        return task

    def clean_soon(self, function: Callable[[], None]) -> None:
        """As :meth:`clean`, for what blocks."""
        self._keep(self.begin(function))

    def _keep(self, future: asyncio.Future[Any]) -> None:
        self._cleaning.add(future)
        future.add_done_callback(self._cleaning.discard)
        future.add_done_callback(_look)

    async def close(self) -> None:
        """Wait until everything is cleaned up."""
        while self._cleaning:
            await asyncio.wait(set(self._cleaning))


def _look(future: asyncio.Future[Any]) -> None:
    """Whoever cares has looked; the loop need not tell of it."""
    if not future.cancelled():
        future.exception()
