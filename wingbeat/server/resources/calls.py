"""Calls of leased values, each at most once: a client that lost an answer asks again with the same id.

None outlives its lease: what still ran would run in a box that is somebody else's by then.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from wingbeat.core.errors import ConflictError, LimitReached, WingbeatError
from wingbeat.core.lending_protocol import POLL_S
from wingbeat.resources import ResourceFailed, ResourceLost

E = TypeVar("E", bound=BaseException)
MAX_RUNNING = 64
"""Of one value at once."""
KEPT_S = 120.0
"""How long a result waits for a client that comes back for it; its connection is tried again for far less."""
KEPT_BYTES = 4 * 2**20
"""Of one value's results, beside the newest."""
MAX_KEPT = 1000
"""Of one value's results."""
MAX_PAST = 1000
CANCEL_S = 20.0
"""How long ending a call is waited for; it goes on."""

Cost = Callable[[Any], int]
Work = Callable[[], Coroutine[Any, Any, Any]]
Hold = Callable[[], Callable[[], None]]
"""Takes something, and returns what gives it back."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call."""

    value: Any = None
    fault: BaseException | None = None

    @classmethod
    def of(cls, task: asyncio.Task[Any]) -> Outcome:
        """Of one that is done."""
        if task.cancelled():
            return cls(fault=ResourceFailed("the call was cancelled"))
        fault = task.exception()
        return cls(task.result()) if fault is None else cls(fault=again(fault))

    def result(self) -> Any:
        """The value.  Raises the fault."""
        if self.fault is not None:
            raise again(self.fault)
        return self.value


def again(fault: E) -> E:
    """The same fault without the frames that it went through, and what they hold: whole bodies, say.  One that is a
    bug of this server keeps them, for the log."""
    if not isinstance(fault, WingbeatError):
        return fault
    fresh = type(fault).__new__(type(fault), *fault.args)
    fresh.__dict__.update(fault.__dict__)
    return fresh


class Calls:
    """Of one leased value."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._unnamed: set[asyncio.Task[Any]] = set()
        self._done: OrderedDict[str, tuple[float, int, Outcome]] = OrderedDict()
        """When they ended, with the size of their results."""
        self.kept_bytes = 0
        """Of results."""
        self._past: OrderedDict[str, None] = OrderedDict()
        """Whose result is no longer kept."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def once(
        self, call_id: str, make: Work, *, size: Cost = lambda result: 0, hold: Hold = lambda: _nothing
    ) -> Outcome | None:
        """Begin the call, or join it; what came of it, None if that takes longer than an answer may, or than the lease.

        ``hold`` takes what the call has until it is done, where it begins.
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
            let_go = hold()
            task.add_done_callback(lambda done: self._ended(call_id, done, size))
            task.add_done_callback(lambda _: let_go())
        await asyncio.wait([task, self._over], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        return Outcome.of(task) if task.done() else None

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
        self.kept_bytes = 0
        return not left

    def _ended(self, call_id: str, task: asyncio.Task[Any], size: Cost) -> None:
        del self._running[call_id]
        outcome = Outcome.of(task)
        num_bytes = 0 if outcome.fault else size(outcome.value)
        self._done[call_id] = (self._clock(), num_bytes, outcome)
        self.kept_bytes += num_bytes
        self.forget()

    def _unnamed_ended(self, task: asyncio.Task[Any]) -> None:
        self._unnamed.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited may be gone: nobody else asks for it

    def drop(self) -> None:
        """All results: whoever lost its answer is told that it is no longer kept."""
        for call_id in self._done:
            self._note(call_id)
        self._done.clear()
        self.kept_bytes = 0

    def forget(self) -> None:
        """Results that are old, and all but the newest where they are too many or too large."""
        now = self._clock()
        while self._done:
            call_id, (ended_at, size, _) = next(iter(self._done.items()))
            is_kept = (self.kept_bytes <= KEPT_BYTES and len(self._done) <= MAX_KEPT) or len(self._done) == 1
            if now - ended_at <= KEPT_S and is_kept:
                return
            self.kept_bytes -= size
            del self._done[call_id]
            self._note(call_id)

    def _note(self, call_id: str) -> None:
        self._past[call_id] = None
        while len(self._past) > MAX_PAST:
            self._past.popitem(last=False)


def _nothing() -> None:
    pass
