"""A client process as its parent starts it: one agent, one runner.

Parent and child exchange lines of JSON: the plan and orders on standard input, news on a pipe of their own, since
agents print where they like.

::

    parent ── plan ──▶                      ◀── ready (digest, files) | failed ── child
           ── go ──▶   leases and runs      ◀── ended, of each episode where their number or time is limited
                                            ◀── begun, alive (counts, every second), where their time is limited
           ── stop ──▶ ends its episodes    ◀── replace (reason), any time
                                            ◀── stats (counts), then done | failed

A parent that vanishes closes standard input, which is an order to stop, too.  One that hears no sign of life for
longer than an episode may take kills this process: shortly before, a thread that needs no turn of the interpreter
writes to standard error where it hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson

from wingbeat.client.agents import Agent
from wingbeat.client.code import loaded_code, split_agent
from wingbeat.client.episode import Episode
from wingbeat.client.plans import RolloutPlan, connect, load_plan, plan_agent
from wingbeat.client.processes import run_async, set_up_logging
from wingbeat.client.runner import Runner
from wingbeat.client.runner_stats import EpisodeEnd
from wingbeat.client.silence import ALIVE_EVERY_S, STACK_BEFORE_S
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.client.user_code import missing_files
from wingbeat.client.worker_process import SIGNALS
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.core.protocol import Lease

FAILED_EXIT = 1
STDERR = 2


class Orders:
    """Standard input, taken from the agent: lines of the parent, from before and after the event loop starts."""

    def __init__(self) -> None:
        self._file = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._rest = b""

    def first_line(self) -> bytes:
        """Blocks; b"" where the parent is gone."""
        while b"\n" not in self._rest:
            read = os.read(self._file, 65536)
            if not read:
                return b""
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def follow(self, on_order: Callable[[dict[str, Any] | None], None]) -> None:
        """Hand every further line to ``on_order``, from the running loop; None once the parent is gone."""
        loop = asyncio.get_running_loop()

        def take() -> None:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                on_order(orjson.loads(line))

        def listen() -> None:
            try:
                read = os.read(self._file, 65536)
            except BlockingIOError:
                return
            if not read:
                loop.remove_reader(self._file)
                on_order(None)
                return
            self._rest += read
            take()

        os.set_blocking(self._file, False)
        loop.add_reader(self._file, listen)
        take()


class News:
    """The pipe to the parent; one that is gone hears nothing, and its orders have ended, too."""

    def __init__(self, file: int) -> None:
        self._file = file
        os.set_inheritable(file, False)

    def tell(self, kind: str, **data: Any) -> None:
        line = orjson.dumps({"news": kind, **data}) + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except BrokenPipeError:
            return


async def _run(plan: RolloutPlan, agent: Agent, orders: Orders, news: News) -> None:
    """The runner's life, from the order to go on."""
    started = asyncio.Event()
    silence_s: float | None = None
    has_deadline, has_limit = plan.options.episode_timeout_s is not None, plan.options.max_episodes is not None

    def tell_begin(lease: Lease, episode: Episode | TeamEpisode) -> None:
        news.tell("begun", lease=lease.lease_id, episode=episode.id, parts=_parts(episode))

    def tell_end(end: EpisodeEnd) -> None:
        news.tell("ended", lease=end.lease_id)

    async with connect(plan) as swarm:
        runner = Runner(
            swarm,
            agent,
            plan.concurrency,
            options=plan.options,
            on_begin=tell_begin if has_deadline else None,
            on_end=tell_end if has_deadline or has_limit else None,
            on_stuck=lambda reason: news.tell("replace", reason=reason),
        )

        def obey(order: dict[str, Any] | None) -> None:
            nonlocal silence_s
            if order is None:
                runner.stop()
            elif order["order"] == "go":
                silence_s = order["silence_s"]
            elif order["order"] == "stop":
                runner.stop(now=order["now"], grace_s=order["grace_s"])
            started.set()

        orders.follow(obey)
        await started.wait()
        if runner.stopping:
            return
        try:
            async with _signs_of_life(runner, news, silence_s):
                await runner.run()
        finally:
            news.tell("stats", stats=dataclasses.asdict(runner.stats))


@contextlib.asynccontextmanager
async def _signs_of_life(runner: Runner, news: News, silence_s: float | None) -> AsyncGenerator[None]:
    """Within the block this loop says that it turns, and before it is killed for its silence, where it hangs."""
    if silence_s is None:
        yield
        return

    async def tell() -> None:
        while True:
            news.tell("alive", stats=dataclasses.asdict(runner.stats))
            faulthandler.dump_traceback_later(silence_s - STACK_BEFORE_S, file=STDERR)
            await asyncio.sleep(ALIVE_EVERY_S)

    telling = asyncio.create_task(tell(), name="wingbeat-alive")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})
        faulthandler.cancel_dump_traceback_later()


def _parts(episode: Episode | TeamEpisode) -> dict[str, tuple[str, str]]:
    """With what the parent can abort it: by server, its id and key."""
    if isinstance(episode, TeamEpisode):
        return {name: (episode[name].id, episode[name].api_key) for name in episode.servers}
    return {"": (episode.id, episode.api_key)}


async def _work(plan: RolloutPlan, agent: Agent, orders: Orders, news: News) -> int:
    """Tells how it ended, and returns the exit code.

    From within the loop: closing that waits for threads of the agent, which may never end.
    """
    try:
        await _run(plan, agent, orders, news)
    except WingbeatError as error:
        return _tell_failure(error, plan, news)
    news.tell("done")
    return 0


def _tell_failure(error: WingbeatError, plan: RolloutPlan, news: News) -> int:
    """The parent watches the agent's files, and those that it lacks, until it is mended."""
    main, name = split_agent(plan.agent)
    code = loaded_code(main.resolve(), name)
    news.tell(
        "failed",
        message=error.message,
        is_setup=isinstance(error, SetupError),
        files=[str(path) for path in code.files],
        missing=[str(path) for path in missing_files(error, main.resolve().parent)],
        digest=code.digest,
    )
    return error.exit_code if isinstance(error, SetupError) else FAILED_EXIT


def main() -> None:
    """The program of a child process; its argument is the number of the pipe."""
    for number in SIGNALS:  # the parent hears them, and says what to do
        signal.signal(number, signal.SIG_IGN)
    orders, news = Orders(), News(int(sys.argv.pop()))
    line = orders.first_line()
    if not line:
        return
    plan = load_plan(line)
    set_up_logging(plan.log_level)
    try:
        agent = plan_agent(plan)
        news.tell("ready", digest=agent.code.digest, files=[str(path) for path in agent.code.files])
    except WingbeatError as error:
        sys.exit(_tell_failure(error, plan, news))
    sys.exit(run_async(_work(plan, agent, orders, news)))
