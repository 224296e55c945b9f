"""The processes of a chaos run: found by a mark that all of them inherit, whatever became of their parents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from wingbeat.core.lifeline import LIFELINE_VARIABLE

MARK_VARIABLE = "WINGBEAT_CHAOS_RUN"
RESTART_S = 0.5
"""Between tries to start a server whose predecessor still holds the port."""


def marked_processes(mark: str) -> dict[int, list[str]]:
    """Command lines of the live processes that carry a mark, by process id."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found: dict[int, list[str]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                words = Path(entry.path, "cmdline").read_bytes().decode(errors="replace").split("\0")
                found[int(entry.name)] = words
    return found


def name_of(words: Sequence[str]) -> str:
    """``control``, ``supervisor``, a worker's id, or "" for anything else."""
    if "--worker-id" in words:
        return words[words.index("--worker-id") + 1]
    if "bench.chaos_control" in words:
        return "control"
    return "supervisor" if "bench.chaos_server" in words else ""


class ServerProcess:
    """The supervisor of the server as a process; one that dies is started again and continues its run.

    So would a service manager: the first tries fail while the old control closes its ledger.
    """

    def __init__(self, config: Path, *, environment: dict[str, str], log: Path) -> None:
        self.run_dir: Path | None = None
        """Set once it is known; from then on that run is continued."""
        self.num_starts = 0
        self._config = config
        self._environment = {**os.environ, **environment, LIFELINE_VARIABLE: "1"}
        self._log = log
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> int:
        """Keep it running until :meth:`stop`; its last exit code.

        Raises RuntimeError where it ends before there is a run.
        """
        while True:
            resume = [] if self.run_dir is None else ["--resume", str(self.run_dir)]
            self.num_starts += 1
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "bench.chaos_server", str(self._config), *resume),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
            code = await self._process.wait()
            if self._stopping:
                return code
            if self.run_dir is None:
                raise RuntimeError(f"the server ended with exit code {code}; see {self._log}")
            await asyncio.sleep(RESTART_S)
            if self._stopping:
                return code

    def stop(self) -> None:
        """SIGTERM, for a clean end."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
