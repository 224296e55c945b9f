"""Running an agent file in one or several processes, until the server says stop or a signal comes.

The first SIGINT or SIGTERM stops gracefully, the second aborts running episodes at once.  Several
processes only hear their parent: a Ctrl-C on the terminal reaches all of them, but would count twice.
A child whose parent vanishes stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import multiprocessing
import signal
from collections.abc import Callable, Coroutine, Iterator
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
    log_level: int = logging.INFO
    """Of child processes; this process keeps its own."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: SpawnProcess
    stats: Any
    """The pipe's end that receives its RunnerStats."""


def run_rollouts(plan: RolloutPlan, *, on_end: Callable[[EpisodeEnd], None] | None = None) -> RunnerStats:
    """Run the plan to its end, from the main thread.

    ``on_end`` hears of every episode if there is one process.  Raises SetupError if the agent cannot
    be loaded, WingbeatError if a child process crashed.
    """
    load_agent(plan.agent)  # faults of the file are told here, once, and not by every child
    if plan.processes == 1:
        return run_async(_run(plan, signals=_SIGNALS, on_end=on_end))
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


async def _run(
    plan: RolloutPlan,
    *,
    signals: tuple[signal.Signals, ...],
    on_end: Callable[[EpisodeEnd], None] | None = None,
) -> RunnerStats:
    agent = load_agent(plan.agent)
    loop = asyncio.get_running_loop()
    async with AsyncSwarm(plan.url, plan.key) as swarm:
        runner = Runner(swarm, agent, plan.concurrency, options=plan.options, on_end=on_end)
        for number in signals:
            loop.add_signal_handler(number, lambda: runner.stop(now=runner.stopping))
        parent = multiprocessing.parent_process()
        if parent is not None:
            loop.add_reader(parent.sentinel, runner.stop)
        try:
            return await runner.run()
        finally:
            if parent is not None:
                loop.remove_reader(parent.sentinel)
            for number in signals:
                loop.remove_signal_handler(number)


def _run_children(plan: RolloutPlan) -> RunnerStats:
    context = multiprocessing.get_context("spawn")
    children: list[_Child] = []
    with _forward_signals(children):
        for share in _shares(plan):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child_main, args=(share, sender), name="wingbeat-rollout")
            process.start()
            sender.close()
            children.append(_Child(process, receiver))
        pending = {child.process.sentinel for child in children}
        while pending:
            pending.difference_update(number for number in wait(list(pending)) if isinstance(number, int))
    stats = RunnerStats()
    for child in children:
        child.process.join()
        if child.process.exitcode == 0 and child.stats.poll():
            stats += child.stats.recv()
        child.stats.close()
    crashed = [child.process.exitcode for child in children if child.process.exitcode != 0]
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
def _forward_signals(children: list[_Child]) -> Iterator[None]:
    """Turn each of our signals into one SIGTERM per child."""

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.process.is_alive():
                child.process.terminate()

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _child_main(plan: RolloutPlan, sender: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging(plan.log_level)
    sender.send(run_async(_run(plan, signals=(signal.SIGTERM,))))
    sender.close()
