"""An engine behind a long line must not slow the others: ``python -m bench.cross_region [--quick]``.

A real control process trains (a scripted trainer takes its steps at once) while two fast engines sample.  By turns a
slow third one joins from behind a line of 300 ms, 4 Mbit/s and losses, over which it also pulls each version's weights,
and leaves by drain.  What the fast two sample per second with it is compared to what they sample without it.  Compute
is a sleep on all of them.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.machine import describe_machine
from bench.scripted_engine import Link, ScriptedEngine, served
from bench.scripted_server import ScriptedServer, scripted_config, write_model_folder
from bench.scripted_tokens import Place
from bench.scripts import Reply, ScriptedCall
from bench.shaping_proxy import Line, ShapingProxy
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import Manifest, UpdateWeights
from wingbeat.core.worker_protocol import ControlMessage, Generate, Leave

BAR = 0.95
POLICY = "solver"
TEXT = " ".join(["1"] * 20)
SLOWNESS = 5.0
"""So many times longer on the slow one."""
MAX_RUNNING = 8
GROUP_SIZE = 4
NUM_GROUPS = 12
"""That clients keep going."""
WEIGHTS_BYTES = 600_000
SETTINGS: dict[str, Any] = {
    "dataflow.group_size": GROUP_SIZE,
    "dataflow.groups_per_step": 8,
    "dataflow.max_staleness": 8,
    "engine.max_running": MAX_RUNNING,
    "server.heartbeat_s": 1.0,
    "server.begin_wait_s": 2.0,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the phases last; each comes ``rounds`` times with the slow engine and as often without."""

    rounds: int = 2
    settle_s: float = 5.0
    window_s: float = 15.0
    fast_s: float = 1.0
    """What a generation takes on a fast engine."""


QUICK = Plan(rounds=1, settle_s=2.0, window_s=4.0)


class TimedEngine(ScriptedEngine):
    """A scripted engine that counts what it sampled, and knows how to leave."""

    def __init__(self, url: str, key: str, name: str, *, seconds: float, **options: Any) -> None:
        super().__init__(url, key, self._say, worker_id=name, bounded=True, keep_calls=0, **options)
        self.num_tokens = 0
        self._seconds = seconds
        self._link_now: Link | None = None

    def _say(self, call: ScriptedCall) -> Reply:
        return Reply(TEXT, delay_s=self._seconds)

    async def _speak(
        self, link: Link, message: Generate, reply: Reply, ids: tuple[int, ...], place: Place, finish: FinishReason
    ) -> None:
        await super()._speak(link, message, reply, ids, place, finish)
        self.num_tokens += len(ids)

    def _handle(self, link: Link, message: ControlMessage) -> None:
        if link.register.role == "engine":
            self._link_now = link
        super()._handle(link, message)

    async def drain(self) -> None:
        """Take no more, and wait for what is here."""
        assert self._link_now is not None
        self._link_now.send(Leave(drain_s=60.0))
        while self._link_now.flights:
            await asyncio.wait(self._link_now.flights.values())


class DistantEngine(TimedEngine):
    """Pulls so many bytes over its line before it acknowledges a version; one at a time, as it is told."""

    def __init__(self, url: str, key: str, name: str, *, seconds: float) -> None:
        super().__init__(url, key, name, seconds=seconds)
        self._http_url = f"{url}/worker/v1/models/{POLICY}/model.safetensors"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._pulls: set[asyncio.Task[None]] = set()
        self.num_pulled = 0

    def _handle(self, link: Link, message: ControlMessage) -> None:
        if not isinstance(message, UpdateWeights):
            super()._handle(link, message)
            return
        self._link_now = link
        task = asyncio.create_task(self._pull(link, message.manifest))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _pull(self, link: Link, manifest: Manifest) -> None:
        body = b""
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while len(body) < WEIGHTS_BYTES:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(self._http_url, headers={"Range": f"bytes={len(body)}-"}) as reply:
                        async for piece in reply.content.iter_any():
                            body += piece
        self.num_pulled += 1
        link.served[manifest.policy] = Place(manifest.lineage, manifest.version)
        link.send(served(manifest))


class Clients:
    """Keeps training groups going, whose members earn different rewards."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self.num_episodes = 0
        self.num_refused = 0

    async def run(self, number: int) -> None:
        for group in range(1_000_000):
            spec = {"id": f"{number}-{group}", "size": GROUP_SIZE}
            members = [self._episode(f"{number}-{group}-{member}", spec, member) for member in range(GROUP_SIZE)]
            await asyncio.gather(*members)

    async def _episode(self, name: str, group: dict[str, Any], member: int) -> None:
        task = {"source": "line", "id": group["id"], "payload": {}}
        body = {"idempotency_key": name, "task": task, "group": group, "policies": [POLICY]}
        begun = await self._post("/api/episodes", body)
        headers = {"Authorization": f"Bearer {begun['api_key']}"}
        question = [{"role": "user", "content": "1 + 1 ?"}]
        await self._post("/v1/chat/completions", {"model": POLICY, "messages": question}, headers)
        await self._post(f"/api/episodes/{begun['episode_id']}/finish", {"rewards": float(member % 2)}, headers)
        self.num_episodes += 1

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Until it is answered: refusals say when to come again."""
        while True:
            async with self._session.post(self._url + path, json=body, headers=headers) as reply:
                if reply.status == 200:
                    return await reply.json()
                if reply.status not in (429, 503):
                    raise RuntimeError(f"{path}: {reply.status} {await reply.text()}")
            self.num_refused += 1
            await asyncio.sleep(0.2)


@dataclass(slots=True)
class Window:
    """What was counted while the engines stood as they did."""

    fast_tokens: int
    slow_tokens: int
    steps: int
    lags: list[int] = field(default_factory=list[int])
    seconds: float = 0.0


@asynccontextmanager
async def running(engine: TimedEngine) -> AsyncIterator[TimedEngine]:
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Measurement:
    """The engines of one server, counted in windows."""

    def __init__(self, server: ScriptedServer, session: aiohttp.ClientSession, fast: list[TimedEngine]) -> None:
        self._server = server
        self._session = session
        self._fast = fast

    async def status(self) -> dict[str, Any]:
        async with self._session.get(f"{self._server.url}/api/status") as reply:
            return await reply.json()

    async def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition(await self.status()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited for {what}")
            await asyncio.sleep(0.05)

    async def window(self, seconds: float, slow: TimedEngine | None) -> Window:
        """Count for so long."""
        engines = [*self._fast, *([] if slow is None else [slow])]
        before, step, lags = [engine.num_tokens for engine in engines], (await self.status())["train_steps"], []
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            await asyncio.sleep(min(0.5, max(0.0, started + seconds - time.monotonic())))
            status = await self.status()
            lags += [_lag(engine) for engine in status["engines"] if engine["name"] == "slow"]
        taken = time.monotonic() - started
        counts = [engine.num_tokens - count for engine, count in zip(engines, before, strict=True)]
        fast = sum(counts[: len(self._fast)])
        return Window(fast, sum(counts) - fast, (await self.status())["train_steps"] - step, lags, taken)


def _lag(engine: dict[str, Any]) -> int:
    return engine["served"].get(POLICY, {}).get("lag", 0)


async def measure(server: ScriptedServer, plan: Plan, *, seed: int) -> dict[str, Any]:
    key, port = server.worker_key, int(server.url.rpartition(":")[2])
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        session = await enter(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        proxy = await enter(ShapingProxy(port, Line(), seed=seed))
        fast = [
            TimedEngine(server.url, key, "fast-0", seconds=plan.fast_s, trainer_of=[POLICY]),
            TimedEngine(server.url, key, "fast-1", seconds=plan.fast_s),
        ]
        fast[0].step_metrics = staleness_of
        for engine in fast:
            await enter(running(engine))
        here = Measurement(server, session, fast)
        await here.until(lambda status: _num_serving(status) == 2, "the fast engines")
        clients = Clients(server.url, session)
        work = [asyncio.create_task(clients.run(number)) for number in range(NUM_GROUPS)]
        stack.callback(lambda: [task.cancel() for task in work])
        windows: dict[bool, list[Window]] = {False: [], True: []}
        pulled = slow_tokens = 0
        for _ in range(plan.rounds):
            await asyncio.sleep(plan.settle_s)
            windows[False].append(await here.window(plan.window_s, None))
            slow = DistantEngine(proxy.url, key, "slow", seconds=plan.fast_s * SLOWNESS)
            async with running(slow):
                await here.until(lambda status: _num_serving(status) == 3, "the slow engine")
                await asyncio.sleep(plan.settle_s)
                windows[True].append(await here.window(plan.window_s, slow))
                await slow.drain()
            pulled += slow.num_pulled
            slow_tokens += slow.num_tokens
            await here.until(lambda status: len(status["engines"]) == 2, "the slow engine to have left")
        for task in work:
            if task.done() and task.exception() is not None:
                raise RuntimeError("a client failed") from task.exception()
        status = await here.status()
        line = {"resets": proxy.num_resets, "stalls": proxy.num_stalls, "bytes": proxy.num_bytes, "versions": pulled}
        return report(windows, clients, status, line, slow_tokens=slow_tokens)


def staleness_of(batch: TrainingBatch) -> dict[str, float]:
    """What a trainer would find."""
    versions = [episode.min_version for episode in batch.episodes]
    return {"staleness/max": float(max((batch.step - 1 - v for v in versions if v is not None), default=0))}


def _num_serving(status: dict[str, Any]) -> int:
    return sum(any(place["gets_calls"] for place in engine["served"].values()) for engine in status["engines"])


def report(
    windows: dict[bool, list[Window]],
    clients: Clients,
    status: dict[str, Any],
    line: dict[str, int],
    *,
    slow_tokens: int,
) -> dict[str, Any]:
    def rate(kind: bool, count: Callable[[Window], int]) -> float:
        return sum(map(count, windows[kind])) / sum(window.seconds for window in windows[kind])

    def fast(window: Window) -> int:
        return window.fast_tokens

    def steps(window: Window) -> int:
        return window.steps

    lags = [lag for window in windows[True] for lag in window.lags]
    ratio = rate(True, fast) / rate(False, fast)
    in_windows = sum(window.slow_tokens for window in windows[True])
    return {
        "throughput_ratio": round(ratio, 4),
        "slow_engine_tokens": slow_tokens,
        "lag": {"max": max(lags, default=0), "mean": round(statistics.fmean(lags), 2) if lags else 0.0},
        "fast_tokens_s": {"without": round(rate(False, fast), 1), "with": round(rate(True, fast), 1)},
        "steps_s": {"without": round(rate(False, steps), 3), "with": round(rate(True, steps), 3)},
        "slow_share": round(in_windows / (in_windows + sum(map(fast, windows[True]))), 4),
        "episodes": clients.num_episodes,
        "refused_begins": clients.num_refused,
        "endings": status["endings"],
        "staleness_max": status["metrics"]["staleness_max"],
        "line": line,
        "bars": {
            "throughput_ratio": ratio >= BAR,
            "slow_engine_tokens": slow_tokens > 0,
            "staleness": status["metrics"]["staleness_max"] <= SETTINGS["dataflow.max_staleness"],
            "no_episode_lost": all(name.startswith("agent/") for name in status["endings"]),
        },
    }


def run(plan: Plan, *, seed: int, folder: Path) -> dict[str, Any]:
    model = write_model_folder(folder / "model")
    (model / "model.safetensors").write_bytes(os.urandom(WEIGHTS_BYTES))  # only carried, never read
    config = scripted_config(folder, SETTINGS, model=model, context_tokens=4096)
    server = ScriptedServer(folder, config, model)
    try:
        server.start()
        return asyncio.run(measure(server, plan, seed=seed))
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cross_region", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the line's losses")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; judges nothing")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wingbeat-region-") as folder:
        plan = QUICK if arguments.quick else Plan()
        summary = run(plan, seed=arguments.seed, folder=Path(folder))
    summary |= {
        "quick": arguments.quick,
        "seed": arguments.seed,
        "elapsed_s": round(time.monotonic() - started, 1),
        "machine": describe_machine(),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.exit(0 if arguments.quick or all(summary["bars"].values()) else 1)


if __name__ == "__main__":
    main()
