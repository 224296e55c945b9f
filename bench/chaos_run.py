"""One chaos run from its first process to its last: calm, then faults, then a clean stop that leaves nothing behind.

::

    this process ── supervisor ── control, trainer, engine-0
         ├── proxy "engine" ── engine-1, as from another machine
         └── proxy "clients" ── 8 x wingbeat rollout
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.chaos_agent import ACKS_VARIABLE
from bench.chaos_control import CLOCK_FILE_VARIABLE, JumpingClocks
from bench.chaos_disk import small_disk
from bench.chaos_faults import Applied, Reach, carry_out
from bench.chaos_plan import CLIENTS, CLIENTS_PROXY, ENGINE_PROXY, ENGINES, Fault
from bench.chaos_processes import MARK_VARIABLE, ServerProcess, marked_processes, name_of
from bench.chaos_proxy import ChaosProxy
from bench.chaos_work import AGENT, CONCURRENCY, chaos_config, sources_of, write_work
from bench.machine import free_port
from wingbeat.deploy.children import Child, ChildSpec

logger = logging.getLogger(__name__)

START_S = 120.0
SETTLE_S = 45.0
"""How long a step may take to come after the last fault; far more than the bar."""
LAPSE_S = 600.0
"""The clocks' last jump: whatever a client still holds lapses."""
DRAIN_S = 20.0
STOP_S = 30.0
POLL_S = 0.05
DISK_MB = 256
STEPS_BEFORE_CALM = 3


@dataclass(slots=True)
class ChaosRun:
    """What a run did, for the report."""

    run_dir: Path
    mark: str
    applied: list[Applied] = field(default_factory=list[Applied])
    steps_s: list[float] = field(default_factory=list[float])
    """When each trained step was seen, monotonic."""
    events: Counter[str] = field(default_factory=Counter[str])
    inexact_replays: int = 0
    calm: tuple[float, float] = (0.0, 0.0)
    chaos: tuple[float, float] = (0.0, 0.0)
    """From when to when, in Unix time."""
    leaked_leases: int = -1
    """-1: the server did not say."""
    exit_code: int | None = None
    """Of the server, once it was asked to stop."""
    disk: str = ""
    server_starts: int = 0
    orphans: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    given_up: list[str] = field(default_factory=list[str])
    """Processes of the benchmark's own that their supervisor did not start again."""


class EventTail:
    """Follows a run's event log by this process's own clock: control's may jump."""

    def __init__(self, path: Path, run: ChaosRun) -> None:
        self._path = path
        self._run = run
        self._read = 0

    async def follow(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Take in the whole lines that have come."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._note(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        self._run.events[event["event"]] += 1
        if event["event"] == "step":
            self._run.steps_s.append(time.monotonic())
        if event["event"] == "replayed" and not event["exact"]:
            self._run.inexact_replays += 1


async def until(condition: Callable[[], Awaitable[bool]], *, what: str, within_s: float) -> None:
    """Raises RuntimeError where the condition does not come true in time."""
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {within_s:.0f} s for {what}")
        await asyncio.sleep(POLL_S)


class Stage:
    """All processes of a run, and what can be done to them; use :func:`on_stage`."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.mark = secrets.token_hex(8)
        self.clocks = JumpingClocks.create(folder / "clocks")
        self.acks = folder / "acks"
        self.port = free_port()
        self.worker_key = secrets.token_urlsafe(24)
        self.children: dict[str, Child] = {}
        self.lives: list[asyncio.Task[None]] = []
        self.exit_code: int | None = None
        """Of the server, once all has ended."""
        self.server: ServerProcess
        self.session: aiohttp.ClientSession
        self.logs = folder / "logs"
        for made in (self.acks, self.logs):
            made.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of the run."""
        return {
            MARK_VARIABLE: self.mark,
            CLOCK_FILE_VARIABLE: str(self.folder / "clocks"),
            ACKS_VARIABLE: str(self.acks),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def write_config(self, runs: Path) -> Path:
        """What the supervisor is started with."""
        model, files = write_work(self.folder / "work", seed=self.seed)
        config = chaos_config(model, files, runs=runs, port=self.port, worker_key=self.worker_key, seed=self.seed)
        path = self.folder / "config.json"
        path.write_text(config.model_dump_json())
        return path

    def pid_of(self, target: str) -> int | None:
        """The process behind a fault's target."""
        if target in self.children:
            return self.children[target].pid
        if target == "supervisor":
            return self.server.pid
        found = marked_processes(self.mark).items()
        return max((pid for pid, words in found if name_of(words) == target), default=None)

    def writers(self) -> list[int]:
        """The processes that write to the run directory."""
        return [pid for pid, words in marked_processes(self.mark).items() if name_of(words) not in ("", ENGINES[1])]

    def spawn(self, name: str, *command: str, key: str = "") -> None:
        """Keep a process running."""
        environment = {**self.environment, **({"WINGBEAT_WORKER_KEY": key} if key else {})}
        spec = ChildSpec(name, [sys.executable, "-m", *command], environment, self.logs / f"{name}.log")
        child = self.children[name] = Child(spec, on_change=lambda child: None, stop_s=STOP_S)
        self.lives.append(asyncio.create_task(child.run(), name=name))

    async def get(self, path: str) -> str | None:
        """A page of the server, past the proxies; None where it does not answer."""
        try:
            async with self.session.get(f"http://127.0.0.1:{self.port}{path}") as answer:
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def is_up(self) -> bool:
        """Whether both engines serve and the trainer is there."""
        if self.server.run_dir is None:
            runs = list((self.folder / "disk" / "runs").glob("*/server.json"))
            self.server.run_dir = runs[0].parent if runs else None
        page = await self.get("/api/policies")
        if page is None:
            return False
        (policy,) = json.loads(page)
        return policy["engines"] == len(ENGINES) and policy["trainer"] != "absent"

    async def held(self) -> int:
        """Leases and attempts that the server still holds for somebody; -1 where it does not answer."""
        page = await self.get("/metrics")
        if page is None:
            return -1
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and line[0] != "#")
        return int(float(values["wingbeat_leases"]) + float(values["wingbeat_open_episodes"]))


@asynccontextmanager
async def on_stage(stage: Stage, config: Path) -> AsyncIterator[dict[str, ChaosProxy]]:
    """The server with both engines up, and the proxies to it; whatever happens, all processes end."""
    stage.server = ServerProcess(config, environment=stage.environment, log=stage.logs / "supervisor.log")
    async with (
        ChaosProxy(stage.port) as clients,
        ChaosProxy(stage.port) as engine,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session,
    ):
        stage.session = session
        life = asyncio.create_task(stage.server.run(), name="server")
        try:
            worker = ("wingbeat.workers", "engine", "--url", engine.url, "--worker-id", ENGINES[1], "--threads", "1")
            stage.spawn(ENGINES[1], *worker, key=stage.worker_key)
            started = asyncio.create_task(until(stage.is_up, what="the server to be up", within_s=START_S))
            await asyncio.wait({life, started}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                started.cancel()
                life.result()
            await started
            yield {CLIENTS_PROXY: clients, ENGINE_PROXY: engine}
        finally:
            await asyncio.gather(*(child.stop() for child in stage.children.values()))
            stage.server.stop()
            await asyncio.wait({life}, timeout=STOP_S)
            stage.exit_code = life.result() if life.done() and life.exception() is None else None
            await asyncio.gather(*stage.lives, return_exceptions=True)
            life.cancel()


@contextmanager
def no_survivors(run: ChaosRun) -> Iterator[None]:
    """Count the processes that outlive the run, then end them."""
    try:
        yield
    finally:
        run.orphans = marked_processes(run.mark)
        for pid in run.orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def perform(stage: Stage, plan: Sequence[Fault], *, calm_s: float, keep: Callable[[Path], None]) -> ChaosRun:
    """The whole run; ``keep`` is called with the run directory once all has ended, while its disk is still there."""
    run = ChaosRun(Path(), stage.mark)
    with small_disk(stage.folder / "disk", megabytes=DISK_MB, writers=stage.writers) as disk:
        run.disk = disk.kind
        config = stage.write_config(disk.folder / "runs")
        with no_survivors(run):
            async with on_stage(stage, config) as proxies:
                assert stage.server.run_dir is not None
                run.run_dir = stage.server.run_dir
                tail = EventTail(run.run_dir / "events.jsonl", run)
                follower = asyncio.create_task(tail.follow())
                try:
                    await _play(stage, run, plan, Reach(stage.pid_of, proxies, disk, stage.clocks), calm_s)
                finally:
                    follower.cancel()
                run.given_up += [
                    name for name, child in stage.children.items() if name not in CLIENTS and child.pid is None
                ]
            tail.look()
            run.server_starts, run.exit_code = stage.server.num_starts, stage.exit_code
        keep(run.run_dir)
    return run


async def _play(stage: Stage, run: ChaosRun, plan: Sequence[Fault], reach: Reach, calm_s: float) -> None:
    for index, name in enumerate(CLIENTS):
        options = ("--source", sources_of(index), "--concurrency", str(CONCURRENCY), "--grace-s", "10")
        command = ("rollout", str(AGENT), "--server", reach.proxies[CLIENTS_PROXY].url, *options)
        stage.spawn(name, "wingbeat.cli", *command)
    await _until_steps(run, STEPS_BEFORE_CALM, within_s=START_S)
    run.calm = (time.time(), time.time() + calm_s)
    await asyncio.sleep(calm_s)
    logger.info("%d steps so far; now come %d faults", len(run.steps_s), len(plan))
    began_s = time.time()
    run.applied = await carry_out(plan, reach)
    run.chaos = (began_s, time.time())
    last_s = max(applied.ended_s for applied in run.applied)
    with contextlib.suppress(RuntimeError):  # the report judges it: the last recovery is infinite then
        await until(lambda: _is_true(any(s > last_s for s in run.steps_s)), what="a last step", within_s=SETTLE_S)
    run.given_up += [f"{name}: {stage.children[name].error}" for name in CLIENTS if stage.children[name].error]
    await asyncio.gather(*(stage.children[name].stop() for name in CLIENTS))
    stage.clocks.jump(monotonic_s=LAPSE_S)
    with contextlib.suppress(RuntimeError):
        await until(lambda: _none_held(stage), what="what was held to lapse", within_s=DRAIN_S)
    run.leaked_leases = await stage.held()


async def _is_true(value: bool) -> bool:
    return value


async def _none_held(stage: Stage) -> bool:
    return await stage.held() == 0


async def _until_steps(run: ChaosRun, count: int, *, within_s: float) -> None:
    await until(lambda: _is_true(len(run.steps_s) >= count), what=f"step {count}", within_s=within_s)
