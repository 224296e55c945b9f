"""Running an agent file in one or several processes, until the server says stop or a signal comes.

The first SIGINT or SIGTERM stops gracefully, the second aborts running episodes at once.  Several
processes only hear their parent, through a pipe: a signal to the whole process group (a Ctrl-C on the
terminal, a service manager) would count twice otherwise.  A child whose parent vanishes stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import multiprocessing
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, TypeVar

from wingbeat.client.agents import load_agent
from wingbeat.client.runner import EpisodeEnd, Runner, RunnerOptions, RunnerStats
from wingbeat.client.swarm import AsyncSwarm
from wingbeat.core.errors import WingbeatError

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOPPED_EARLY = tuple(-number for number in _SIGNALS)
"""Exit codes of children that a signal met before they had begun to ignore it."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Which agent runs where.  Plain data: it travels to child processes."""

    agent: str
    """``FILE.py`` or ``FILE.py:NAME``."""
    url: str = "http://127.0.0.1:8321"
    key: str | None = None
    concurrency: int = 16
    """Episodes at once in each process."""
    processes: int = 1
    options: RunnerOptions = field(default_factory=RunnerOptions)
    resources: str = ""
    """Import path ``MODULE:NAME`` of what makes each process's resource pool; "" for none."""
    log_level: int = logging.INFO
    """Of child processes; this process keeps its own."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: SpawnProcess
    pipe: Any
    """To it: whether to stop at once.  From it: its RunnerStats."""


def run_rollouts(plan: RolloutPlan, *, on_end: Callable[[EpisodeEnd], None] | None = None) -> RunnerStats:
    """Run the plan to its end, from the main thread.

    ``on_end`` hears of every episode if there is one process.  Raises SetupError if the agent cannot
    be loaded, WingbeatError if a child process crashed.
    """
    load_agent(plan.agent)  # faults of the file are told here, once, and not by every child
    if plan.processes == 1:
        return run_async(_run(plan, on_end=on_end))
    return _run_children(plan)


def set_up_logging(level: int) -> None:
    """Log to standard error, as the programs that run agents do; never called by the library itself.

    The HTTP libraries of the usual SDKs log a line per model call, which would bury everything else.
    """
    logging.basicConfig(level=level, format="%(asctime)s %(process)d %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, on uvloop where it is installed."""
    uvloop = importlib.import_module("uvloop") if importlib.util.find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop is not None else None) as runner:
        return runner.run(main)


@contextlib.asynccontextmanager
async def _connect(plan: RolloutPlan) -> AsyncGenerator[AsyncSwarm]:
    """The swarm of one process, with its resource pool."""
    async with contextlib.AsyncExitStack() as stack:
        pool = None
        if plan.resources:
            module, _, name = plan.resources.partition(":")
            pool = await stack.enter_async_context(getattr(importlib.import_module(module), name)())
        yield await stack.enter_async_context(AsyncSwarm(plan.url, plan.key, resources=pool))


async def _run(plan: RolloutPlan, *, on_end: Callable[[EpisodeEnd], None] | None = None) -> RunnerStats:
    """Run in this process, heeding its signals."""
    loop = asyncio.get_running_loop()
    async with _connect(plan) as swarm:
        runner = Runner(swarm, load_agent(plan.agent), plan.concurrency, options=plan.options, on_end=on_end)
        for number in _SIGNALS:
            loop.add_signal_handler(number, lambda: runner.stop(now=runner.stopping))
        try:
            return await runner.run()
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


async def _run_child(plan: RolloutPlan, pipe: Any) -> RunnerStats:
    """Run in a child process, heeding its parent: True asks to stop at once, False gracefully."""
    loop = asyncio.get_running_loop()
    async with _connect(plan) as swarm:
        runner = Runner(swarm, load_agent(plan.agent), plan.concurrency, options=plan.options)

        def listen() -> None:
            try:
                runner.stop(now=pipe.recv())
            except (EOFError, OSError):  # the parent is gone
                loop.remove_reader(pipe.fileno())
                runner.stop()

        loop.add_reader(pipe.fileno(), listen)
        try:
            return await runner.run()
        finally:
            loop.remove_reader(pipe.fileno())


def _run_children(plan: RolloutPlan) -> RunnerStats:
    context = multiprocessing.get_context("spawn")
    children: list[_Child] = []
    with _stop_on_signals(children) as stops:
        for share in _shares(plan):
            ours, theirs = context.Pipe()
            process = context.Process(target=_child_main, args=(share, theirs), name="wingbeat-rollout")
            process.start()
            theirs.close()
            children.append(_Child(process, ours))
        pending = {child.process.sentinel for child in children}
        while pending:
            pending.difference_update(number for number in wait(list(pending)) if isinstance(number, int))
    stats = RunnerStats()
    crashed: list[int | None] = []
    for child in children:
        child.process.join()
        code = child.process.exitcode
        if code == 0:
            stats += child.pipe.recv()
        elif not (stops and code in _STOPPED_EARLY):
            crashed.append(code)
        child.pipe.close()
    if crashed:
        raise WingbeatError(
            f"{len(crashed)} of {plan.processes} client processes ended with exit codes {crashed}; their log says why"
        )
    return stats


def _shares(plan: RolloutPlan) -> list[RolloutPlan]:
    """One plan per process; ``max_episodes`` is divided among them."""
    limit = plan.options.max_episodes
    if limit is None:
        return [plan] * plan.processes
    parts = [limit // plan.processes + (i < limit % plan.processes) for i in range(plan.processes)]
    return [replace(plan, options=replace(plan.options, max_episodes=part)) for part in parts if part]


@contextlib.contextmanager
def _stop_on_signals(children: list[_Child]) -> Iterator[list[int]]:
    """Pass our signals on to the children; yields the list of those that came."""
    came: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        now = bool(came)
        came.append(number)
        for child in children:
            with contextlib.suppress(OSError):  # it has ended
                child.pipe.send(now)

    before = {number: signal.signal(number, tell) for number in _SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _child_main(plan: RolloutPlan, pipe: Any) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(plan.log_level)
    pipe.send(run_async(_run_child(plan, pipe)))
    pipe.close()
