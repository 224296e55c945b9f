"""Carrying a plan out, and noting when each fault really began and ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.chaos_control import JumpingClocks
from bench.chaos_disk import Disk
from bench.chaos_plan import CLOCKS, Fault, Kind
from bench.chaos_proxy import ChaosProxy

logger = logging.getLogger(__name__)

ALIVE_S = 30.0
"""How long a fault waits for a process that an earlier one ended."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Applied:
    """A fault that happened."""

    fault: Fault
    began_s: float
    ended_s: float
    """Both monotonic."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What faults act on."""

    pid_of: Callable[[str], int | None]
    """The process behind a target's name now."""
    proxies: Mapping[str, ChaosProxy]
    disk: Disk
    clocks: JumpingClocks


async def carry_out(plan: Sequence[Fault], reach: Reach) -> list[Applied]:
    """Every fault at its time, also while others last; returns once the last one has ended."""
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_apply_at(began_s + fault.at_s, fault, reach)) for fault in plan]
    return [applied for task in tasks if (applied := task.result()) is not None]


async def _apply_at(at_s: float, fault: Fault, reach: Reach) -> Applied | None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    began_s = time.monotonic()
    if fault.kind in (Kind.SIGKILL, Kind.SIGSTOP):
        found = await _until_alive(fault.target, reach)
        if found is None:
            logger.warning("%s of %s: there was no such process for %.0f s", fault.kind, fault.target, ALIVE_S)
            return None
        began_s = time.monotonic()
        await _signal(fault, found)
    else:
        await _disturb(fault, reach)
    applied = Applied(fault, began_s, time.monotonic())
    logger.info("%s of %s for %.1f s", fault.kind, fault.target, applied.ended_s - began_s)
    return applied


async def _until_alive(target: str, reach: Reach) -> int | None:
    deadline = time.monotonic() + ALIVE_S
    while time.monotonic() < deadline:
        pid = reach.pid_of(target)
        if pid is not None:
            return pid
        await asyncio.sleep(POLL_S)
    return None


async def _signal(fault: Fault, pid: int) -> None:
    try:
        if fault.kind is Kind.SIGKILL:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:  # another fault ended it meanwhile
        logger.info("%s of %s: it has ended", fault.kind, fault.target)


async def _disturb(fault: Fault, reach: Reach) -> None:
    match fault.kind:
        case Kind.RESET:
            reach.proxies[fault.target].reset()
        case Kind.PARTITION:
            await reach.proxies[fault.target].partition(fault.duration_s)
        case Kind.SLOW:
            await reach.proxies[fault.target].slow(fault.duration_s, delay_s=fault.amount)
        case Kind.TRUNCATE:
            await reach.proxies[fault.target].truncate(fault.duration_s)
        case Kind.FULL_DISK:
            await asyncio.to_thread(reach.disk.fill)
            try:
                await asyncio.sleep(fault.duration_s)
            finally:
                await asyncio.to_thread(reach.disk.free)
        case Kind.CLOCK:
            reach.clocks.jump(monotonic_s=fault.amount if fault.target == CLOCKS else 0.0, wall_s=fault.amount)
        case _:
            raise AssertionError(f"{fault.kind} is sent as a signal")


def recoveries_s(applied: Sequence[Applied], steps_s: Sequence[float]) -> list[float]:
    """Seconds from each fault's end to the next trained step; infinite where none came."""
    return [min((step - a.ended_s for step in steps_s if step > a.ended_s), default=float("inf")) for a in applied]


def middle(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0
