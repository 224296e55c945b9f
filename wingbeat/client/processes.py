"""Running an agent file in one or several processes, until the server says stop or a signal comes.

The first SIGINT or SIGTERM stops gracefully, the second aborts running episodes at once.  Child processes only hear
their parent, through a pipe: a signal to the whole process group (a Ctrl-C on the terminal, a service manager) would
count twice otherwise.  A child whose parent vanishes stops by itself.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from wingbeat.client.agents import Agent
from wingbeat.client.deadlines import LEAVING_S
from wingbeat.client.plans import RolloutPlan, connect, plan_agent
from wingbeat.client.runner import Runner
from wingbeat.client.runner_stats import EpisodeEnd, RunnerStats
from wingbeat.client.worker_process import on_signals
from wingbeat.core.errors import SetupError

logger = logging.getLogger("wingbeat.client")

T = TypeVar("T")


def run_rollouts(plan: RolloutPlan, *, on_end: Callable[[EpisodeEnd], None] | None = None) -> RunnerStats:
    """Run the plan to its end, from the main thread.

    ``on_end`` hears of every episode if the agent runs in this process.  Raises SetupError if the agent cannot
    be loaded, WingbeatError if a child process cannot be kept running.
    """
    if not plan.is_managed:
        return run_async(_run(plan, plan_agent(plan), on_end=on_end))
    if plan.watch and plan.maker:
        raise SetupError("--watch follows the files of an agent, and this one is no file: leave it out")
    if plan.watch and plan.options.max_episodes is not None:
        raise SetupError("an agent that is watched runs until it is stopped: leave out max_episodes, or --watch")
    from wingbeat.client.fleet import Fleet  # not needed by most clients

    return asyncio.run(Fleet(plan).run())


def set_up_logging(level: int) -> None:
    """Log to standard error, as the programs that run agents do; never called by the library itself.

    The HTTP libraries of the usual SDKs log a line per model call, which would bury everything else.
    """
    logging.basicConfig(level=level, format="%(asctime)s %(process)d %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _tell_quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio has to say when all is over is of agents' things, and cures nothing."""
    logger.debug("at the end: %s", context.get("message"))


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, on uvloop where it is installed, with an end: agents that swallow their cancellation are left.

    Nor does it wait for threads that an agent has not left; the end of the process does (:func:`leave_in_time`).
    """
    uvloop = importlib.import_module("uvloop") if importlib.util.find_spec("uvloop") else None
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop is not None else None)
    try:
        return runner.run(main)
    finally:
        loop = runner.get_loop()
        num_left = loop.run_until_complete(_end_tasks())
        if num_left:
            logger.warning("agents do not end although they were cancelled: %d; leaving without them", num_left)
        else:
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.set_exception_handler(_tell_quietly)
        loop.close()


async def _end_tasks() -> int:
    """Cancel all that still runs; how many do not care."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    return len((await asyncio.wait(tasks, timeout=LEAVING_S))[1]) if tasks else 0


def leave_in_time(exit_code: int, *, after_s: float = LEAVING_S) -> None:
    """This process is about to end: end it the hard way where threads of an agent keep it from that."""

    def watch() -> None:
        time.sleep(after_s)
        logger.warning("threads of agents do not end; leaving without them")
        sys.stdout.flush()
        os._exit(exit_code)

    threading.Thread(target=watch, name="leave-in-time", daemon=True).start()


async def _run(plan: RolloutPlan, agent: Agent, *, on_end: Callable[[EpisodeEnd], None] | None = None) -> RunnerStats:
    """Run in this process, heeding its signals."""
    async with connect(plan) as swarm:
        runner = Runner(swarm, agent, plan.concurrency, options=plan.options, on_end=on_end)
        with on_signals(lambda: runner.stop(now=runner.stopping)):
            return await runner.run()
