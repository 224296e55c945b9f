"""Calls of leased values, each at most once: a client that lost an answer asks again with the same id."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from wingbeat.core.errors import ConflictError, LimitReached
from wingbeat.core.lending_protocol import POLL_S

MAX_RUNNING = 64
"""Of one value at once."""
KEPT_S = 120.0
"""How long a result waits for a client that comes back for it; its connection is tried again for far less."""
KEPT_BYTES = 4 * 2**20
MAX_PAST = 1000

Cost = Callable[[Any], int]


class Calls:
    """Of one leased value."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._done: OrderedDict[str, tuple[float, int, asyncio.Task[Any]]] = OrderedDict()
        """When they ended, with the size of their results."""
        self._past: OrderedDict[str, None] = OrderedDict()
        """Whose result is no longer kept."""

    async def once(
        self, call_id: str, make: Callable[[], Coroutine[Any, Any, Any]], *, size: Cost = lambda result: 0
    ) -> asyncio.Task[Any] | None:
        """Begin the call, or join it; its task once it is done, None if that takes longer than an answer may.

        Raises LimitReached for too many at once, ConflictError for a call whose result was dropped.
        """
        self._forget()
        if call_id in self._done:
            return self._done[call_id][2]
        task = self._running.get(call_id)
        if task is None:
            if call_id in self._past:
                raise ConflictError("this call was made before, and its result is no longer kept")
            if len(self._running) >= MAX_RUNNING:
                raise LimitReached(f"this resource runs {MAX_RUNNING} calls at once, which is all it takes")
            task = self._running[call_id] = asyncio.create_task(make(), name="call")
            task.add_done_callback(lambda done: self._ended(call_id, done, size))
        await asyncio.wait([task], timeout=POLL_S)
        return task if task.done() else None

    async def cancel(self, call_id: str) -> None:
        """End a call that runs; one that comes later does not begin."""
        task = self._running.get(call_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        elif call_id not in self._done:
            self._note(call_id)

    async def close(self) -> None:
        """End all that run."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._done.clear()

    def _ended(self, call_id: str, task: asyncio.Task[Any], size: Cost) -> None:
        del self._running[call_id]
        failed = task.cancelled() or task.exception() is not None
        self._done[call_id] = (self._clock(), 0 if failed else size(task.result()), task)
        self._forget()

    def _forget(self) -> None:
        """All but the newest, once they are old or too many bytes."""
        total = sum(size for _, size, _ in self._done.values())
        now = self._clock()
        while len(self._done) > 1:
            call_id, (ended_at, size, _) = next(iter(self._done.items()))
            if now - ended_at <= KEPT_S and total <= KEPT_BYTES:
                return
            total -= size
            del self._done[call_id]
            self._note(call_id)

    def _note(self, call_id: str) -> None:
        self._past[call_id] = None
        while len(self._past) > MAX_PAST:
            self._past.popitem(last=False)
