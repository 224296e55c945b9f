"""The actor on a node that keeps one process running there.

Ray starts the actor again (on another node, where its own is gone) with the arguments it was made with, and the process
with it: whatever died, the same process comes back.  The process ends with its actor (:mod:`wingbeat.core.lifeline`).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wingbeat.deploy.children import Child, ChildSpec, ChildState


@dataclass(frozen=True, slots=True)
class Order:
    """What an actor keeps running."""

    name: str
    arguments: Sequence[str]
    """Of the node's own Python interpreter."""
    environment: Mapping[str, str] = field(repr=False)
    """Keys among it."""
    log: Path
    """Where the node cannot write there, its log is in a folder of its own in the node's temporary one."""


@dataclass(frozen=True, slots=True)
class Report:
    """How the process is."""

    state: ChildState
    error: str
    pid: int | None


class Keeper:
    """One process, from the first :meth:`report` on."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None

    async def report(self) -> Report:
        """Start the process if need be, and say how it is."""
        if self._child is None:
            order = self._order
            spec = ChildSpec(order.name, [sys.executable, *order.arguments], order.environment, log_file(order.log))
            self._child = Child(spec, on_change=lambda child: None)
            self._task = asyncio.create_task(self._child.run(), name=order.name)
        if self._task is not None and self._task.done():
            self._task.result()  # raises if it ended by a fault of ours
        child = self._child
        return Report(child.state, child.error, child.pid)

    async def stop(self) -> None:
        """End the process in peace; returns once it has ended."""
        if self._child is not None and self._task is not None:
            await self._child.stop()
            await self._task


def log_file(wanted: Path) -> Path:
    """``wanted`` where this node has its folder and can write there, else a file in a new folder of nobody else's."""
    try:
        wanted.open("ab").close()
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"wingbeat-{wanted.stem}-"), wanted.name)
    return wanted
