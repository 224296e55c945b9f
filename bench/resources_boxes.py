"""Sandboxes by the hundred: what the pool makes of the time that a sandbox takes to start.

256 sandboxes, each new, pass through 16 slots, and each runs a program that waits 50 ms. The limit is set by what
it costs to start a sandbox and a program in it, measured in the same minute without the pool: a slot cannot do
better than that time plus 50 ms, nor all slots together better than the machine starts sandboxes when 16 are
started at a time (``sandbox_vs_limit`` is of the smaller of the two). Then episodes that think before they touch their
sandbox, with and without asking for it at their beginning (``prefetch_gain``).

Run: ``python -m bench.resources_boxes [--quick]``.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from wingbeat.resources import Resources, SandboxSpec
from wingbeat.resources.backends.sandbox import SandboxBackend

SLOTS = 16
PROGRAM_S = 0.05
THINK_S = 0.15
"""What an episode does before its first command: a call of its model."""

SPEC = SandboxSpec(limit=SLOTS, memory_mb=64, pids=32)


def boxes(quick: bool) -> dict[str, Any]:
    """Measures; see the module."""
    return asyncio.run(_boxes(48 if quick else 256, 8 if quick else 32))


async def _boxes(num_boxes: int, num_episodes: int) -> dict[str, Any]:
    backend = SandboxBackend()
    backend.check(SPEC)
    alone = [await _timed(lambda: _start_up(backend)) for _ in range(10)]
    before = await _rate(num_boxes // 2, lambda: _start_up(backend))
    with tempfile.TemporaryDirectory() as folder:
        async with Resources(ledger=Path(folder)) as pool:
            throughput = await _rate(num_boxes, lambda: _lease_and_run(pool))
    after = await _rate(num_boxes // 2, lambda: _start_up(backend))
    await backend.close()
    start_s = statistics.median(alone)
    limit = min((before + after) / 2, SLOTS / (start_s + PROGRAM_S))
    without = await _episodes(num_episodes, prefetches=False)
    ahead = await _episodes(num_episodes, prefetches=True)
    return {
        "sandbox_start_s": start_s,
        "sandbox_starts_per_s": (before + after) / 2,
        "sandboxes_per_s": throughput,
        "sandbox_vs_limit": throughput / limit,
        "sandbox_episode_s": without,
        "sandbox_episode_prefetched_s": ahead,
        "prefetch_gain": without / ahead,
    }


async def _rate(count: int, work: Callable[[], Awaitable[None]]) -> float:
    """How often per second it can be done, as many at a time as there are slots."""
    left = iter(range(count))

    async def slot() -> None:
        for _ in left:
            await work()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(SLOTS):
            group.create_task(slot())
    return count / (time.perf_counter() - began)


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def _start_up(backend: SandboxBackend) -> None:
    """A sandbox, a program in it that does nothing, and its end."""
    instance = await backend.start(SPEC, started=lambda _: None)
    await instance.value.run(["true"])
    await instance.close()


async def _lease_and_run(pool: Resources) -> None:
    async with pool.lease(SPEC) as lease:
        done = await lease.value.run(["sleep", str(PROGRAM_S)])
        assert done.ok, done


async def _episodes(count: int, *, prefetches: bool) -> float:
    """Seconds that an episode takes, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        async with Resources(ledger=Path(folder)) as pool:
            began = time.perf_counter()
            for number in range(count):
                owner = f"episode-{number}"
                if prefetches:
                    pool.prefetch(SPEC, owner=owner)
                await asyncio.sleep(THINK_S)
                async with pool.lease(SPEC, owner=owner) as lease:
                    assert (await lease.value.run(["true"])).ok
            return (time.perf_counter() - began) / count


def main() -> None:
    """Prints the figures as JSON."""
    sys.stdout.write(json.dumps({**boxes("--quick" in sys.argv[1:]), "machine": describe_machine()}) + "\n")


if __name__ == "__main__":
    main()
