"""An episode's time, and what to do about an agent that does not end: the client's side of deadlines.

Python cannot end a thread, and a coroutine may swallow its cancellation.  So an overdue agent is left behind: its
episode is aborted and its slot is free at once, and a process that has left behind too much asks to be replaced.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from wingbeat.core.errors import WingbeatError

T = TypeVar("T")

LEAVING_S = 5.0
"""How long a cancelled agent may tidy up before it counts as stuck."""


class EpisodeOverdue(WingbeatError):
    """The agent ran longer than its client allows."""

    code = "episode_overdue"


class Deadline:
    """Bounds the life of episodes; counts the agents that did not end when told to."""

    def __init__(self, limit_s: float, *, on_check: Callable[[], None]) -> None:
        """``on_check`` is called when an overdue agent has had time enough to end."""
        self.limit_s = limit_s
        self._on_check = on_check
        self._left_behind: set[asyncio.Task[Any]] = set()

    @property
    def message(self) -> str:
        return f"the agent ran longer than {self.limit_s:g} s (episode_timeout_s)"

    @property
    def num_stuck(self) -> int:
        return sum(not task.done() for task in self._left_behind)

    async def run(self, work: Coroutine[Any, Any, T], *, give_up: Callable[[str], Coroutine[Any, Any, None]]) -> T:
        """The result of ``work``.  Raises EpisodeOverdue after ``give_up`` has ended the episode."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task}, timeout=self.limit_s)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=LEAVING_S)
            raise
        if task.done():
            return task.result()
        try:
            await give_up(self.message)
        finally:
            task.cancel()
            self._left_behind.add(task)
            task.add_done_callback(self._ended)
            asyncio.get_running_loop().call_later(LEAVING_S, self._on_check)
        raise EpisodeOverdue(self.message)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left_behind.discard(task)
        if not task.cancelled():
            task.exception()  # nobody else asks: its episode is over


def memory_mb() -> float:
    """What this process holds in memory, in MiB; where the system does not say, the most that it ever held."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
