"""A client process of the swarm benchmark: the real SDK with many quick agents, and a watch on every call of it.

Started by :mod:`bench.swarm_scale`; runs until SIGTERM, lets its episodes end, and writes what it saw to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import aiohttp

from wingbeat import AsyncSwarm, Episode
from wingbeat.client import Runner, RunnerOptions
from wingbeat.client.processes import run_async, set_up_logging
from wingbeat.client.swarm import BeginOptions
from wingbeat.core.protocol import LeaseReply
from wingbeat.core.types import Split

NUM_TURNS = 4
TOOL_S = (0.5, 2.5)
"""Seconds of an agent's own work between two turns."""
GRACE_S = 60.0
"""How long running episodes get to end in: several times what one takes."""
PROBE_S = 1.0
CALL_S = 120.0
QUESTION = "how long does it take , and how many are there ?"


@dataclass(slots=True)
class Watch:
    """What this process saw."""

    calls: defaultdict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list[tuple[float, float]])
    )
    """When each call ended (Unix time), and how many seconds it took, retries included; by what was called."""
    begun: int = 0
    acknowledged: list[str] = field(default_factory=list[str])
    """``episode id:attempt`` of each finish that was acknowledged."""

    @contextlib.contextmanager
    def timed(self, call: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.calls[call].append((time.time(), time.perf_counter() - started))


class WatchedSwarm(AsyncSwarm):
    """Times its own calls.  Those that raise are not timed: their episodes count as lost."""

    def __init__(self, url: str, watch: Watch) -> None:
        super().__init__(url)
        self._watch = watch

    async def begin(self, **options: Unpack[BeginOptions]) -> Episode:
        with self._watch.timed("begin"):
            episode = await super().begin(**options)
        self._watch.begun += 1
        return episode

    async def lease(self, max_leases: int = 1, **options: Any) -> LeaseReply:
        """An answer without leases has waited for work, as it should: it is not timed."""
        started = time.perf_counter()
        reply = await super().lease(max_leases, **options)
        if reply.leases:
            self._watch.calls["lease"].append((time.time(), time.perf_counter() - started))
        return reply


class Agent:
    """Talks for a few turns and finishes."""

    def __init__(self, watch: Watch, *, tool_s: tuple[float, float]) -> None:
        self._watch = watch
        self._tool_s = tool_s
        self._rng = random.Random(os.getpid())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=CALL_S)
        )

    async def close(self) -> None:
        await self._session.close()

    async def solve(self, episode: Episode) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
        for turn in range(NUM_TURNS):
            if turn:
                await asyncio.sleep(self._rng.uniform(*self._tool_s))
            body = {"model": "solver", "messages": messages, "max_tokens": 128}
            async with self._session.post(
                f"{episode.base_url}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {episode.api_key}"},
            ) as answer:
                answer.raise_for_status()
                messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": QUESTION}]
        with self._watch.timed("finish"):
            await episode.finish(float(episode.id.rpartition("-")[2]))
        self._watch.acknowledged.append(f"{episode.id}:{episode.attempt}")


async def probe(swarm: AsyncSwarm, watch: Watch) -> None:
    """Ask for the status now and then, as people and dashboards do."""
    while True:
        await asyncio.sleep(PROBE_S)
        with watch.timed("status"):
            await swarm.status()


async def run(url: str, *, concurrency: int, tool_s: tuple[float, float], probes: bool, report: Path) -> None:
    """Run episodes until SIGTERM."""
    watch = Watch()
    loop = asyncio.get_running_loop()
    agent = Agent(watch, tool_s=tool_s)
    async with WatchedSwarm(url, watch) as swarm:
        options = RunnerOptions(grace_s=GRACE_S, splits=(Split.TRAIN,))
        runner = Runner(swarm, agent.solve, concurrency, options=options)
        loop.add_signal_handler(signal.SIGTERM, runner.stop)
        prober = asyncio.create_task(probe(swarm, watch)) if probes else None
        try:
            stats = await runner.run()
        finally:
            if prober is not None:
                prober.cancel()
            await agent.close()
    seen = {
        "calls": watch.calls,
        "begun": watch.begun,
        "acknowledged": watch.acknowledged,
        "failed": stats.num_failed,
        "refused": stats.num_refused,
        "cancelled": stats.num_cancelled,
        "cpu_s": sum(os.times()[:2]),
    }
    await asyncio.to_thread(report.write_text, json.dumps(seen))


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--tool-s", type=float, nargs=2, default=TOOL_S)
    parser.add_argument("--probe", action="store_true", help="also ask for the status every second")
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    set_up_logging(logging.INFO)
    tool_s: tuple[float, float] = tuple(given.tool_s)
    work = run(given.server, concurrency=given.concurrency, tool_s=tool_s, probes=given.probe, report=given.report)
    run_async(work)


if __name__ == "__main__":
    main()
