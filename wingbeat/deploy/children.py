"""One supervised child process: started, watched, restarted, and never outliving its supervisor.

STARTING ──▶ RUNNING ──death──▶ BACKOFF ──▶ STARTING …
                ├──setup error, or too many deaths──▶ FAILED
                └──exit code 0──▶ STOPPED                  any ──stop──▶ STOPPED
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from wingbeat.core.deaths import Deaths
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import without_keys
from wingbeat.core.lifeline import LIFELINE_VARIABLE

logger = logging.getLogger(__name__)

STOP_S = 10.0
SETUP_ERROR_EXIT = 2
ERROR_PREFIX = "error: "
"""How our processes begin the one line of a setup error."""


class ChildState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    FAILED = "failed"
    STOPPED = "stopped"


TRANSITIONS: Mapping[ChildState, frozenset[ChildState]] = {
    ChildState.STARTING: frozenset({ChildState.RUNNING, ChildState.FAILED, ChildState.STOPPED}),
    ChildState.RUNNING: frozenset({ChildState.BACKOFF, ChildState.FAILED, ChildState.STOPPED}),
    ChildState.BACKOFF: frozenset({ChildState.STARTING, ChildState.FAILED, ChildState.STOPPED}),
    ChildState.FAILED: frozenset({ChildState.STOPPED}),
    ChildState.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class Child:
    """Keeps one process running until :meth:`stop`."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        on_change: Callable[[Child], None],
        clock: Callable[[], float] = time.monotonic,
        stop_s: float = STOP_S,
    ) -> None:
        """``stop_s``: how long :meth:`stop` waits for the process to end by itself."""
        self.spec = spec
        self.state = ChildState.STARTING
        self.restarts = 0
        self.error = ""
        self._watchers = [on_change]
        self._stop_s = stop_s
        self._process: asyncio.subprocess.Process | None = None
        self._deaths = Deaths(clock)
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def _become(self, state: ChildState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.spec.name}: {self.state} cannot become {state}")
        self.state = state
        for watcher in self._watchers:
            watcher(self)

    def watch(self, on_change: Callable[[Child], None]) -> None:
        """Also tell ``on_change`` of every later state, and of the present one now."""
        self._watchers.append(on_change)
        on_change(self)

    async def run(self) -> None:
        """Start, watch and restart until stopped or failed."""
        while not self._stopping.is_set():
            try:
                code = await self._run_once()
            except OSError as error:  # no such program, or none that this machine can run
                self.error = f"{self.spec.name} cannot be started: {error}"
                self._become(ChildState.FAILED)
                return
            if self._stopping.is_set() or code == 0:  # it was told to end, by us or by control
                break
            self._deaths.count(by_signal=code < 0)
            if code == SETUP_ERROR_EXIT or self._deaths.are_too_many:
                self.error = self._last_words(code)
                self._become(ChildState.FAILED)
                return
            logger.warning("%s ended with exit code %s; starting it again", self.spec.name, code)
            self._become(ChildState.BACKOFF)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._deaths.pause_s)
            if not self._stopping.is_set():
                self.restarts += 1
                self._become(ChildState.STARTING)
        if self.state is not ChildState.STOPPED:
            self._become(ChildState.STOPPED)

    async def _run_once(self) -> int:
        """The process's whole life; its standard input is the lifeline."""
        with self.spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**without_keys(os.environ), **self.spec.environment, LIFELINE_VARIABLE: "1"},
                start_new_session=True,
            )
        self._become(ChildState.RUNNING)
        if self._stopping.is_set():  # stopped while it was being started
            self._process.kill()
        return await self._process.wait()

    def _last_words(self, code: int) -> str:
        """A setup error in its own words, anything else with the end of the log."""
        words = tail(self.spec.log)
        if code == SETUP_ERROR_EXIT and words.startswith(ERROR_PREFIX):
            return words.removeprefix(ERROR_PREFIX)
        often = f", for the last of {self._deaths.words()}" if self._deaths.are_too_many else ""
        return f"{self.spec.name} ended with exit code {code}{often}: {words}"

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after ``stop_s``."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._stop_s)
        except TimeoutError:
            logger.warning("%s did not end within %.0f s; killing it", self.spec.name, self._stop_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def tail(log: Path, *, num_lines: int = 6) -> str:
    """The last lines of a log; the line of a setup error alone where there is one."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return f"(no log: {error})"
    recent = lines[-num_lines:]  # what is older may be of an earlier process
    errors = [line for line in recent if line.startswith(ERROR_PREFIX)]
    return errors[-1] if errors else " | ".join(recent)


async def run_to_end(command: Sequence[str], *, what: str) -> str:
    """Run a helper process and return its standard output.  Raises SetupError with its last words."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        lines = err.decode(errors="replace").strip().splitlines()
        raise SetupError(f"{what} failed: {lines[-1] if lines else f'exit code {process.returncode}'}")
    return out.decode()
