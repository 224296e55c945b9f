"""Keeps the client processes of an agent running, and replaces them when they or its code ask for it.

Every process has a *seat*.  A successor is started, loads the agent, and only then takes over: the one before leases
no more, ends what it runs within the grace, and goes.  So code that does not load replaces nothing, and no seat is
ever empty because of an edit::

    seat ── process ── ends well ─────────────────▶ done
             │ ├────── crashes ── back-off ───────▶ another process
             │ ├────── stands still: is killed ───▶ another process
             │ ├────── asks to be replaced ───────▶ a successor
             │ └────── its files change ──────────▶ a successor with the new code
             └ draining: those before it, until they end or are killed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

from wingbeat.client.code import code_on_disk, split_agent
from wingbeat.client.plans import RolloutPlan
from wingbeat.client.runner_stats import RunnerStats
from wingbeat.client.watch import FileWatch
from wingbeat.client.worker_process import Failure, WorkerProcess, on_signals
from wingbeat.core.deaths import Deaths
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.core.types import CODE_SHOWN

logger = logging.getLogger("wingbeat.client")

MAX_DRAINING = 2
"""Processes of one seat that may end their episodes beside the one that works; older ones abort theirs."""


class Seat:
    """The place of one process, whichever fills it."""

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan = plan
        self.process: WorkerProcess | None = None
        self.draining: list[WorkerProcess] = []
        self.deaths = Deaths(time.monotonic)
        """Too many, and the seat is given up, or waits for other code where that is watched."""
        self.taken_over = asyncio.Event()
        """Another process than before sits here."""

    def limit(self, num_done: int) -> bool:
        """So many of the episodes that it may run are done; False where none are left."""
        limit = self.plan.options.max_episodes
        if limit is None:
            return True
        if num_done < limit:
            self.plan = self.plan.limited(limit - num_done)
        return num_done < limit

    def take_over(self, process: WorkerProcess) -> None:
        """The successor goes to work, and the one before drains."""
        before, self.process = self.process, process
        if before is not None and not before.ended.is_set():
            before.stop(grace_s=self.plan.drain_s)
            self.draining.append(before)
        process.go()
        self.draining = [old for old in self.draining if not old.ended.is_set()]
        for old in self.draining[:-MAX_DRAINING]:
            old.stop(now=True)
        self.taken_over.set()


class Fleet:
    """All processes of one plan."""

    def __init__(self, plan: RolloutPlan) -> None:
        self._plan = plan
        self._main, self._name = split_agent(plan.agent)
        self._main = self._main.resolve()
        self.seats = [Seat(share) for share in plan.shares()]
        self._all: list[WorkerProcess] = []
        self._past = RunnerStats()
        """Of processes that have ended and left their seats."""
        self._watch = FileWatch()
        self._stopping = asyncio.Event()

    @property
    def draining(self) -> list[WorkerProcess]:
        return [process for seat in self.seats for process in seat.draining]

    async def run(self) -> RunnerStats:
        """To the end of the run, or until :meth:`stop`.

        Raises SetupError where the agent cannot be loaded or fails always, WingbeatError where a process cannot be
        kept running.
        """
        with on_signals(lambda: self.stop(now=self._stopping.is_set())):
            try:
                first = await self._start(self.seats[0])
                if first.failure is not None:
                    raise _error(first.failure)
                self._follow(first.files, first.digest)
                self.seats[0].take_over(first)
                await self._keep_all()
                return self._sum()
            finally:
                await self._end_all()

    def stop(self, *, now: bool = False) -> None:
        """Lease no more; running episodes end within the grace, or are aborted at once."""
        self._stopping.set()
        for process in self._all:
            if not process.ended.is_set():
                process.stop(now=now)

    async def _keep_all(self) -> None:
        """Until every seat is done; the first that cannot be kept ends the others, and its error is raised."""
        keepers = {asyncio.create_task(self._keep(seat), name="seat") for seat in self.seats}
        tasks = set(keepers)
        if self._plan.watch:
            tasks.add(asyncio.create_task(self._follow_edits(), name="watch"))
        try:
            while not all(keeper.done() for keeper in keepers):
                done, _ = await asyncio.wait(
                    [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for process in self.draining:
            await process.wait()

    async def _end_all(self) -> None:
        """No process outlives its fleet."""
        left = [process for process in self._all if not process.ended.is_set()]
        for process in left:
            process.stop()
        await asyncio.gather(*(process.wait() for process in left))

    def _new(self, plan: RolloutPlan) -> WorkerProcess:
        """Of those that have ended, only the counts are kept."""
        seated = {seat.process for seat in self.seats}
        over = [process for process in self._all if process.ended.is_set() and process not in seated]
        for process in over:
            self._past += process.stats
            self._all.remove(process)
        process = WorkerProcess(plan)
        self._all.append(process)
        return process

    def _sum(self) -> RunnerStats:
        total = self._past
        for process in self._all:
            total += process.stats
        return total

    # --- one seat

    async def _start(self, seat: Seat) -> WorkerProcess:
        """A process that has loaded the agent and waits, or has failed."""
        process = self._new(seat.plan)
        await process.start()
        if self._stopping.is_set() and not process.ended.is_set():
            process.stop()
        return process

    async def _keep(self, seat: Seat) -> None:
        """Fill a seat until its process ends well, or all stop."""
        while True:
            process = seat.process
            if process is None:
                await self._refill(seat)
                if seat.process is None:
                    return
                continue
            seat.taken_over.clear()
            await _first(process.changed.wait(), seat.taken_over.wait())
            if seat.process is not process:
                continue
            process.changed.clear()
            if process.ended.is_set():
                if not await self._go_on(seat, process):
                    return
            elif process.replacement_reason:
                await self.replace(seat, process.replacement_reason)

    async def _go_on(self, seat: Seat, process: WorkerProcess) -> bool:
        """What follows the end of a seat's process; False where nothing does.  Raises where nothing can."""
        failure = process.failure
        if failure is None or self._stopping.is_set():
            return False
        if failure.is_told and not (self._plan.watch and failure.is_setup):
            raise _error(failure)
        if failure.is_overdue:  # no crash: each one takes as long as an episode may
            seat.process = None
            if goes_on := seat.limit(process.num_ended):
                logger.info("starting another client process in place of %s", process.pid)
            return goes_on
        if not failure.is_told:
            seat.deaths.count(by_signal=failure.is_by_signal)
            if not seat.deaths.are_too_many:
                seat.process = None
                if not seat.limit(process.num_ended):
                    return False
                logger.warning("a client process crashed; starting another one in %g s", seat.deaths.pause_s)
                await _first(asyncio.sleep(seat.deaths.pause_s), self._stopping.wait(), seat.taken_over.wait())
                return True
        if not self._plan.watch:
            raise WingbeatError(
                f"client processes crashed {seat.deaths.words()}, the last: {failure.message}; its log says why"
            )
        logger.error("%s; waiting for its code to change", failure.message)
        seat.deaths = Deaths(time.monotonic)
        await _first(seat.taken_over.wait(), self._stopping.wait())
        return not self._stopping.is_set()

    async def _refill(self, seat: Seat) -> None:
        """Start a process where the one before crashed, or none was; leaves the seat empty once all stop."""
        if self._stopping.is_set() or seat.process is not None:
            return
        process = await self._start(seat)
        if seat.process is not None:  # an edit was faster
            process.kill()
        elif process.failure is None and not self._stopping.is_set():
            seat.take_over(process)
        else:
            seat.process = process  # its failure is dealt with as that of one that ran

    async def replace(self, seat: Seat, reason: str) -> None:
        """Put a fresh process into a seat; where it does not load, the old one stays."""
        logger.warning("replacing client process %s: %s", seat.process.pid if seat.process else "-", reason)
        if seat.plan.options.max_episodes is not None and seat.process is not None:
            seat.process.stop()  # what is left to do is known once it has ended
            await seat.process.wait()
            if not seat.limit(seat.process.num_ended):
                return
        process = await self._start(seat)
        if process.failure is None:
            seat.take_over(process)
        else:
            logger.error("the successor does not load: %s", process.failure.message)

    # --- edits

    async def _follow_edits(self) -> None:
        """Whenever the agent's code is another one than what runs, let that run."""
        while True:
            await self._watch.changed()
            await self._switch()

    async def _switch(self) -> None:
        """Replace the processes of older code, once the new one has loaded."""
        candidate = await self._candidate()
        running = self.seats[0].process
        before = "" if running is None else running.digest
        failure = candidate.failure
        if failure is not None:
            logger.error("the new code does not load, and the old one goes on: %s", failure.message)
            if failure.is_told:  # one that just ended would end again: wait for other content than was noticed
                files = () if running is None else running.files
                self._follow(failure.files, failure.digest, more={*files, *failure.missing, self._main})
            return
        if not self._follow(candidate.files, candidate.digest):  # it was edited again meanwhile
            candidate.kill()
            return
        if candidate.digest == before and all(seat.process and seat.process.digest == before for seat in self.seats):
            candidate.kill()
            return
        logger.info("the agent's code is %s now, and was %s", candidate.digest[:CODE_SHOWN], before[:CODE_SHOWN])
        others = await asyncio.gather(*(self._start(seat) for seat in self.seats[1:]))
        for seat, process in zip(self.seats, [candidate, *others], strict=True):
            if self._stopping.is_set():
                continue
            if process.failure is not None:  # edited again, and the next look finds it; or the machine is at its end
                logger.error("one process with the new code did not start: %s", process.failure.message)
                continue
            seat.deaths = Deaths(time.monotonic)
            seat.take_over(process)

    async def _candidate(self) -> WorkerProcess:
        """A process with the code as it is now; one that takes its time to load gives way to the next edit."""
        while True:
            process = self._new(self.seats[0].plan)
            starting = asyncio.create_task(process.start())
            editing = asyncio.create_task(self._watch.changed())
            try:
                await asyncio.wait({starting, editing}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    return process
            finally:
                editing.cancel()
                await asyncio.wait({editing})
                if not starting.done():
                    process.kill()
                    await asyncio.wait({starting})

    def _follow(self, files: Collection[Path], digest: str, *, more: Collection[Path] = ()) -> bool:
        """Watch the files of a process, and ``more``, whose code was tried; False where the disk has another by now."""
        self._watch.follow({*files, *more})
        try:
            is_on_disk = code_on_disk(files, self._main, self._name) == digest
        except OSError:
            is_on_disk = False
        if not is_on_disk:
            self._watch.forget()
        return is_on_disk


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of them is over; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error(failure: Failure) -> WingbeatError:
    return SetupError(failure.message) if failure.is_setup else WingbeatError(failure.message)
