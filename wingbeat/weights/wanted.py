"""Work that ends early once nobody wants what comes of it: who knows is on another thread, and asked now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

POLL_S = 0.1
Wanted = Callable[[], bool]


async def while_wanted(work: Coroutine[Any, Any, None], is_wanted: Wanted) -> bool:
    """Whether it came to its end; raises what it raises."""
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.wait({task}, timeout=POLL_S)
        if not task.done() and not is_wanted():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False
    task.result()
    return True
