"""What taking turns at pooled objects costs, beside an ideal first-come-first-served line of bare futures.

Time is that of a loop which has a processor to itself: the processor time that this process took, and the sleeps it
slept.  On a busy machine the wall clock would measure the neighbours.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from wingbeat.resources import Budgets, LocalSpec, Resources, Reuse

LEASES, QUICK_LEASES = 10_000, 1_000
WAITERS, QUICK_WAITERS = 2048, 256
SLOTS = 64
HOLD_S = 0.001
"""How long each holder has its object: 2,048 who wait for 64 of them are served in 32 ms, if turns cost nothing."""
REPEATS, QUICK_REPEATS = 5, 2


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """Its time is this process's processor time plus the sleeps of its timers, which it skips."""

    def __init__(self) -> None:
        self._skipped_s = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return time.process_time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


class _Skipping(selectors.DefaultSelector):
    def __init__(self, loop: OwnTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self._loop.skip(timeout)
        return ready


class Ideal:
    """As little as a fair line can do: an object that is given back goes to whoever has waited for longest."""

    def __init__(self, slots: int) -> None:
        self._free = [Thing() for _ in range(slots)]
        self._line: deque[asyncio.Future[Thing]] = deque()

    async def acquire(self) -> Thing:
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[Thing] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        return await turn

    def release(self, thing: Thing) -> None:
        if self._line:
            self._line.popleft().set_result(thing)
        else:
            self._free.append(thing)


class Thing:
    """What is pooled."""

    def reset(self) -> None:
        """Nothing to do: only the turns are measured."""


SPEC = LocalSpec(factory=Thing, reuse=Reuse.AFTER_RESET, reset=Thing.reset, limit=SLOTS)


def pool(quick: bool) -> dict[str, Any]:
    """Measures; the best of the repeats, in which the two take turns."""
    leases, waiters = (QUICK_LEASES, QUICK_WAITERS) if quick else (LEASES, WAITERS)
    times: dict[tuple[str, float], list[float]] = {}
    for _ in range(QUICK_REPEATS if quick else REPEATS):
        for hold_s in (HOLD_S, 0.0):
            for name, run in (("ideal", _ideal), ("pool", _pool)):
                with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
                    times.setdefault((name, hold_s), []).append(runner.run(run(leases, waiters, hold_s)))
    best = {key: min(values) for key, values in times.items()}
    return {
        "pool_leases": leases,
        "pool_waiters": waiters,
        "pool_slots": SLOTS,
        "pool_hold_s": HOLD_S,
        "pool_s": best["pool", HOLD_S],
        "pool_ideal_s": best["ideal", HOLD_S],
        "pool_time_vs_ideal": best["pool", HOLD_S] / best["ideal", HOLD_S],
        "pool_cpu_us_per_lease": best["pool", 0.0] / leases * 1e6,
        "pool_ideal_cpu_us_per_lease": best["ideal", 0.0] / leases * 1e6,
    }


async def _ideal(leases: int, waiters: int, hold_s: float) -> float:
    line = Ideal(SLOTS)

    async def use() -> None:
        thing = await line.acquire()
        await asyncio.sleep(hold_s)
        line.release(thing)

    return await _timed(leases, waiters, use)


async def _pool(leases: int, waiters: int, hold_s: float) -> float:
    async with Resources(Budgets()) as resources:

        async def use() -> None:
            async with resources.lease(SPEC):
                await asyncio.sleep(hold_s)

        await asyncio.gather(*(use() for _ in range(SLOTS)))  # the objects are there, as those of the ideal line
        return await _timed(leases, waiters, use)


async def _timed(leases: int, waiters: int, use: Callable[[], Awaitable[None]]) -> float:
    left = leases

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await use()

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(work() for _ in range(waiters)))
    return loop.time() - began
