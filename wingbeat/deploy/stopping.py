"""What a first Ctrl-C, or SIGTERM, does to a command: it ends in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """A signal came before there was a run."""


def stop_event() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; the second one ends the process as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(signum: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, handle, signum)
    return stop


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of ``work``; None where a signal comes first, once it has ended what it had started."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() and not (working.done() and working.exception() is None):
            return None  # also where the same signal killed a helper process, which is no fault
        return working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
