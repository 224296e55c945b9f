"""One child process that runs an agent, as its parent sees it; :mod:`wingbeat.client.worker_main` is the other side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from wingbeat.client.plans import RolloutPlan, dump_plan
from wingbeat.client.runner_stats import RunnerStats
from wingbeat.client.silence import ALIVE_EVERY_S, Parts, Silence, abort_overdue, silence_limit_s
from wingbeat.core.ports import Clock

logger = logging.getLogger("wingbeat.client")

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from wingbeat.client.worker_main import main; main()"
)
"""A child imports from where its parent does, whatever started that."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ask a command that runs agents to end."""
_LINE_BYTES = 2**24
_EXIT_S = 5.0
"""A process that has said its last word and does not end (threads of some library) is killed after this."""
_LAST_NEWS_S = 1.0
_ABORT_S = 15.0
"""Beyond the grace, what a process gets to abort its episodes."""
_SHOWN = 8
"""Episodes that a message names."""


@contextlib.contextmanager
def on_signals(heed: Callable[[], None]) -> Iterator[None]:
    """Within the block the running loop calls ``heed`` whenever such a signal comes."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, heed)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a process ended that should have gone on."""

    message: str
    is_told: bool
    """It said so itself, and would say so again; else it crashed, or was killed."""
    is_overdue: bool = False
    """It was killed, since its event loop stood still for longer than the episodes in it may take."""
    is_by_signal: bool = False
    """Another process, or the system, killed it."""
    is_setup: bool = False
    """The agent, or this machine, must be changed first."""
    files: tuple[Path, ...] = ()
    """The agent's files, as far as they were loaded."""
    missing: tuple[Path, ...] = ()
    """Where what it imports in vain could be."""
    digest: str = ""
    """Of the files."""


class WorkerProcess:
    """Starts, waits to be told to go, runs, ends.  From one event loop.

    Where episodes have a time limit, a process whose own event loop stands still for longer is killed
    (:mod:`wingbeat.client.silence`).
    """

    def __init__(self, plan: RolloutPlan, *, clock: Clock = time.monotonic) -> None:
        self.plan = plan
        self.digest = ""
        self.files: tuple[Path, ...] = ()
        self.stats = RunnerStats()
        self.num_ended = 0
        """Episodes so far, where their number or time is limited."""
        self.replacement_reason = ""
        """Why it asks to be replaced, once it does."""
        self.failure: Failure | None = None
        """Set once it has ended, unless it ended well."""
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()
        """Set by every news; whoever waits clears it."""
        self._is_ready = asyncio.Event()
        self._is_done = False
        limit_s = silence_limit_s(plan)
        self._silence = None if limit_s is None else Silence(limit_s, clock=clock)
        self._running: dict[str, tuple[str, Parts]] = {}
        """Episodes, by lease; where they have a time limit."""
        self._life: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> bool:
        """Load the agent; False where that fails (:attr:`failure`)."""
        read, write = os.pipe()
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        loop = asyncio.get_running_loop()
        try:
            pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb"))
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _BOOT,
                json.dumps(sys.path),
                str(write),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write,),
            )
        except BaseException:
            self.ended.set()
            raise
        finally:
            os.close(write)
        self._life = asyncio.create_task(self._follow(reader), name=f"client-{self._process.pid}")
        self._life.add_done_callback(lambda life: pipe.close())
        self._send(dump_plan(self.plan))
        await self._is_ready.wait()
        return not self.ended.is_set()

    def go(self) -> None:
        """Begin to lease."""
        self._order(order="go", silence_s=None if self._silence is None else self._silence.limit_s)

    def stop(self, *, now: bool = False, grace_s: float | None = None) -> None:
        """Lease no more and end within the grace (None: the plan's), or abort at once; killed where it does neither."""
        grace_s = self.plan.options.grace_s if grace_s is None else grace_s
        if self._process is None:
            return
        self._order(order="stop", now=now, grace_s=grace_s)
        limit_s = _ABORT_S if now else grace_s + _ABORT_S
        asyncio.get_running_loop().call_later(limit_s, self.kill)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait(self) -> None:
        """Until it has ended."""
        await self.ended.wait()

    def _order(self, **order: Any) -> None:
        self._send(orjson.dumps(order))

    def _send(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        if not self._process.stdin.is_closing():  # else it has ended, and its news say how
            self._process.stdin.write(line + b"\n")

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Take news until the process ends."""
        assert self._process is not None
        reading = asyncio.create_task(self._read(reader))
        watching = asyncio.create_task(self._kill_if_silent())
        code = await self._process.wait()
        watching.cancel()
        await asyncio.wait({reading}, timeout=_LAST_NEWS_S)  # a process that it forked may hold the pipe open
        reading.cancel()
        try:
            if self.failure is not None and self.failure.is_overdue:
                await self._end_overdue(self.failure.message)
            elif not self._is_done and self.failure is None:
                words = f"client process {self.pid} ended with exit code {code}"
                self.failure = Failure(words, is_told=False, is_by_signal=code < 0)
        finally:
            self.ended.set()
            self._is_ready.set()
            self.changed.set()

    async def _kill_if_silent(self) -> None:
        if self._silence is None:
            return
        while not self._silence.look():  # noqa: ASYNC110 - silence makes no event
            await asyncio.sleep(ALIVE_EVERY_S)
        message = (
            f"client process {self.pid} is killed: its event loop stood still for {self._silence.seconds:.0f} s, longer"
            f" than an episode may take (episode_timeout_s = {self.plan.options.episode_timeout_s:g}), so an agent or a"
            f" library computes or blocks there; the log has the stack. Episodes that end as timeout: {self._shown()}"
        )
        logger.error("%s", message)
        self.failure = Failure(message, is_told=False, is_overdue=bool(self._running))
        self.kill()

    def _shown(self) -> str:
        names = [episode_id for episode_id, _ in self._running.values()]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN]) or 'none'}{more}"

    async def _end_overdue(self, message: str) -> None:
        """What it ran counts as run, and as timed out."""
        running = [parts for _, parts in self._running.values()]
        self._running.clear()
        self.num_ended += len(running)
        self.stats = replace(self.stats, num_timed_out=self.stats.num_timed_out + len(running))
        await abort_overdue(self.plan, running, message=message)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (line := await reader.readline()).endswith(b"\n"):
            self._take(orjson.loads(line))
            if self._is_done or self.failure is not None:
                asyncio.get_running_loop().call_later(_EXIT_S, self.kill)

    def _take(self, news: Mapping[str, Any]) -> None:
        match news["news"]:
            case "ready":
                self.digest, self.files = news["digest"], tuple(map(Path, news["files"]))
                self._is_ready.set()
            case "alive":
                self.stats = RunnerStats(**news["stats"])
                if self._silence is not None:
                    self._silence.heard()
            case "begun":
                self._running[news["lease"]] = news["episode"], news["parts"]
            case "ended":
                self.num_ended += 1
                self._running.pop(news["lease"], None)
            case "replace":
                self.replacement_reason = news["reason"]
            case "stats":
                self.stats = RunnerStats(**news["stats"])
                if self._silence is not None:
                    self._silence.end()
            case "done":
                self._is_done = True
            case "failed":
                self.failure = Failure(
                    news["message"],
                    is_told=True,
                    is_setup=news["is_setup"],
                    files=tuple(map(Path, news["files"])),
                    missing=tuple(map(Path, news["missing"])),
                    digest=news["digest"],
                )
            case strange:
                raise AssertionError(f"news of a client process that nobody knows: {strange!r}")
        self.changed.set()
