"""Calls of leased values, each at most once: a client that lost an answer asks again with the same id.

None outlives its lease: what still ran would run in a box that is somebody else's by then.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from wingbeat.core.errors import ConflictError, LimitReached
from wingbeat.core.lending_protocol import POLL_S
from wingbeat.resources import ResourceLost

MAX_RUNNING = 64
"""Of one value at once."""
KEPT_S = 120.0
"""How long a result waits for a client that comes back for it; its connection is tried again for far less."""
KEPT_BYTES = 4 * 2**20
"""Of one value's results, beside the newest."""
MAX_PAST = 1000
CANCEL_S = 20.0
"""How long ending a call is waited for; it goes on."""

Cost = Callable[[Any], int]
Work = Callable[[], Coroutine[Any, Any, Any]]


class Calls:
    """Of one leased value."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._unnamed: set[asyncio.Task[Any]] = set()
        self._done: OrderedDict[str, tuple[float, int, asyncio.Task[Any]]] = OrderedDict()
        """When they ended, with the size of their results."""
        self._past: OrderedDict[str, None] = OrderedDict()
        """Whose result is no longer kept."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def once(self, call_id: str, make: Work, *, size: Cost = lambda result: 0) -> asyncio.Task[Any] | None:
        """Begin the call, or join it; its task once it is done, None if that takes longer than an answer may, or than
        the lease.

        Raises LimitReached for too many at once, ConflictError for a call whose result was dropped, ResourceLost once
        the lease is over.
        """
        self.forget()
        if call_id in self._done:
            return self._done[call_id][2]
        task = self._running.get(call_id)
        if task is None:
            if call_id in self._past:
                raise ConflictError(
                    "this call was made before, or ended before it came, and its result is no longer kept; give it"
                    " another call_id if it may be made twice",
                    param="call_id",
                )
            task = self._running[call_id] = self._begin(make)
            task.add_done_callback(lambda done: self._ended(call_id, done, size))
        await asyncio.wait([task, self._over], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        return task if task.done() else None

    async def unnamed(self, make: Work) -> Any:
        """The result of a call that changes nothing, so that it may as well be made again; cancelled, so is the call.

        Raises as :meth:`once`, and what the call raises.
        """
        task = self._begin(make)
        self._unnamed.add(task)
        task.add_done_callback(self._unnamed_ended)
        try:
            await asyncio.wait([task, self._over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if not task.done() or task.cancelled():
            raise ResourceLost("the lease ended while this call ran")
        return task.result()

    def _begin(self, make: Work) -> asyncio.Task[Any]:
        if self._over.done():
            raise ResourceLost("the lease is over; take a new one")
        if len(self._running) + len(self._unnamed) >= MAX_RUNNING:
            raise LimitReached(f"this resource runs {MAX_RUNNING} calls at once, which is all it takes: wait for one")
        return asyncio.create_task(make(), name="call")

    async def cancel(self, call_id: str) -> None:
        """End a call that runs, and wait a while for it; one that comes later does not begin."""
        task = self._running.get(call_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)
        elif call_id not in self._done:
            self._note(call_id)

    def stop(self) -> None:
        """The lease is over: cancel all that run, before anything of it can reach what the next holder has."""
        if not self._over.done():
            self._over.set_result(None)
        for task in (*self._running.values(), *self._unnamed):
            task.cancel()

    async def close(self) -> bool:
        """End all that run, and wait a while for it; whether nothing runs any more."""
        self.stop()
        tasks = [*self._running.values(), *self._unnamed]
        left = (await asyncio.wait(tasks, timeout=CANCEL_S))[1] if tasks else ()
        self._done.clear()
        return not left

    def _ended(self, call_id: str, task: asyncio.Task[Any], size: Cost) -> None:
        del self._running[call_id]
        failed = task.cancelled() or task.exception() is not None
        self._done[call_id] = (self._clock(), 0 if failed else size(task.result()), task)
        self.forget()

    def _unnamed_ended(self, task: asyncio.Task[Any]) -> None:
        self._unnamed.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited may be gone: nobody else asks for it

    @property
    def kept_bytes(self) -> int:
        """Of results."""
        return sum(size for _, size, _ in self._done.values())

    def drop(self) -> None:
        """All results: whoever lost its answer is told that it is no longer kept."""
        for call_id in self._done:
            self._note(call_id)
        self._done.clear()

    def forget(self) -> None:
        """Results that are old, and all but the newest where they are too many bytes."""
        total = self.kept_bytes
        now = self._clock()
        while self._done:
            call_id, (ended_at, size, _) = next(iter(self._done.items()))
            is_kept = total <= KEPT_BYTES or len(self._done) == 1
            if now - ended_at <= KEPT_S and is_kept:
                return
            total -= size
            del self._done[call_id]
            self._note(call_id)

    def _note(self, call_id: str) -> None:
        self._past[call_id] = None
        while len(self._past) > MAX_PAST:
            self._past.popitem(last=False)
