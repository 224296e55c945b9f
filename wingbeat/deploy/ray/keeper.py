"""The actor on a node that keeps one process running there.

It starts the process again as a supervisor of this machine would.  Where it dies itself, or its node does, the driver
makes another one with the same order.  The process ends with its actor (:mod:`wingbeat.core.lifeline`).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

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
    restarts: int = 0
    """Of this keeper."""
    node: str = ""
    """Its id, for Ray."""
    address: str = ""
    """Of the node."""
    log: Path = Path()
    """On the node."""


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
            own = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # a resources server may lend of the cluster
            command = [sys.executable, *order.arguments]
            spec = ChildSpec(order.name, command, {**own, **order.environment}, log_file(order.log))
            self._child = Child(spec, on_change=lambda child: None)
            self._task = asyncio.create_task(self._child.run(), name=order.name)
        if self._task is not None and self._task.done():
            self._task.result()  # raises if it ended by a fault of ours
        child = self._child
        return Report(
            child.state,
            child.error,
            child.pid,
            restarts=child.restarts,
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            log=child.spec.log,
        )

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
