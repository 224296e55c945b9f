"""Control groups: what holds a box to its limits however many processes it makes.

A box has one group for what runs in it, made where :mod:`wingbeat.resources.backends.limits_homes` says. Groups of
owners that are gone are removed by whoever makes the next one.

Processes enter by themselves, before they become the command, through files that the owner opened: nothing in a
box may write to control groups, and none needs to be seen there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wingbeat.resources.backends.limits_homes import CPU, CPUACCT, MEMORY, PIDS, Homes, hint_of, is_abandoned, new_name
from wingbeat.resources.specs import ResourceFailed

logger = logging.getLogger("wingbeat.resources")

PERIOD_US = 100_000
REMOVE_S = 5.0
"""The kernel lets go of a group shortly after its last process."""


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """None: not limited."""

    memory_bytes: int | None = None
    pids: int | None = None
    cpus: float | None = None
    counts_cpu: bool = False
    """Whether used processor time is asked for."""
    holds_together: bool = False
    """Whether a group is wanted for nothing but to find all processes."""

    @property
    def controllers(self) -> tuple[str, ...]:
        """Those that these limits need."""
        wanted = {
            MEMORY: self.memory_bytes is not None,
            PIDS: self.pids is not None or self.holds_together,
            CPU: self.cpus is not None,
            CPUACCT: self.counts_cpu,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


@dataclass(frozen=True, slots=True)
class Counters:
    """What the kernel counted in a group so far."""

    memory_kills: int = 0
    pids_refused: int = 0
    cpu_s: float = 0.0


class Group:
    """The control group of one box: one folder (v2) or one for each controller (v1)."""

    def __init__(self, folders: Sequence[Path], version: int) -> None:
        self.folders = tuple(dict.fromkeys(folders))
        self.version = version

    @classmethod
    def make(cls, homes: Homes, limits: GroupLimits) -> Group:
        """Raises ResourceFailed, and leaves nothing behind."""
        try:
            name = new_name()
        except OSError as error:
            raise ResourceFailed(f"no control group can be named: {error}{hint_of(error)}") from error
        group = cls([homes.folders[controller] / name for controller in limits.controllers], homes.version)
        made: list[Path] = []
        try:
            for folder in group.folders:
                folder.mkdir()
                made.append(folder)
            group._limit(limits)
        except OSError as error:
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise ResourceFailed(f"no control group {name}: {error}{hint_of(error)}") from error
        return group

    def _limit(self, limits: GroupLimits) -> None:
        if limits.pids is not None:
            self._write("pids.max", str(limits.pids))
        if self.version == 1:
            if limits.memory_bytes is not None:
                self._write("memory.limit_in_bytes", str(limits.memory_bytes))
                if self._file("memory.memsw.limit_in_bytes") is not None:
                    self._write("memory.memsw.limit_in_bytes", str(limits.memory_bytes))
            if limits.cpus is not None:
                self._write("cpu.cfs_period_us", str(PERIOD_US))
                self._write("cpu.cfs_quota_us", str(max(1000, int(limits.cpus * PERIOD_US))))
            return
        if limits.memory_bytes is not None:
            self._write("memory.max", str(limits.memory_bytes))
            if self._file("memory.swap.max") is not None:
                self._write("memory.swap.max", "0")
        if limits.cpus is not None:
            self._write("cpu.max", f"{max(1000, int(limits.cpus * PERIOD_US))} {PERIOD_US}")

    def open_entries(self) -> list[int]:
        """Files through which a process enters by writing ``0``; the caller closes them."""
        fds: list[int] = []
        try:
            for folder in self.folders:
                fds.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise ResourceFailed(f"a control group of this box cannot be entered: {error}{hint_of(error)}") from error
        return fds

    def counters(self) -> Counters:
        """Now; zeros for what is not counted."""
        if self.version == 1:
            nanoseconds = self._read("cpuacct.usage").strip()
            return Counters(
                memory_kills=_count(self._read("memory.oom_control"), "oom_kill"),
                pids_refused=_count(self._read("pids.events"), "max"),
                cpu_s=int(nanoseconds) / 1e9 if nanoseconds else 0.0,
            )
        return Counters(
            memory_kills=_count(self._read("memory.events"), "oom_kill"),
            pids_refused=_count(self._read("pids.events"), "max"),
            cpu_s=_count(self._read("cpu.stat"), "usage_usec") / 1e6,
        )

    def processes(self) -> set[int]:
        """The ids of those in it."""
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found.update(map(int, (folder / "cgroup.procs").read_text(encoding="ascii").split()))
        return found

    def kill(self) -> None:
        """All that is in it: at once where the kernel does that (v2 since 5.14), so that none is made meanwhile."""
        if self.version == 2:
            with contextlib.suppress(OSError):
                (self.folders[0] / "cgroup.kill").write_text("1", encoding="ascii")
                return
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Whether all of it is gone; False while the kernel still holds some."""
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                return False
        return True

    def end(self, *, within_s: float = REMOVE_S) -> bool:
        """Kill whatever is in it and remove it; returns whether anything was there.  Blocks for a moment."""
        was_there = any(folder.is_dir() for folder in self.folders)
        until = time.monotonic() + within_s
        while not self.remove():
            self.kill()
            if time.monotonic() > until:
                raise ResourceFailed(f"control group {self.folders[0].name} cannot be removed: processes stay in it")
            time.sleep(0.002)
        return was_there

    def _file(self, name: str) -> Path | None:
        return next((folder / name for folder in self.folders if (folder / name).exists()), None)

    def _write(self, name: str, value: str) -> None:
        path = self._file(name)
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "the kernel has no such limit", name)
        path.write_text(value, encoding="ascii")

    def _read(self, name: str) -> str:
        """Empty for what this group does not count, and after its end."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                return (folder / name).read_text(encoding="ascii")
        return ""


def _count(text: str, name: str) -> int:
    """The number beside a name in a file of counters."""
    return next((int(value) for key, _, value in (line.partition(" ") for line in text.splitlines()) if key == name), 0)


def sweep(homes: Homes) -> int:
    """Ends and removes what dead owners left; returns how many groups."""
    found: dict[str, list[Path]] = {}
    for folder in set(homes.folders.values()):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if is_abandoned(entry.name):
                    found.setdefault(entry.name, []).append(Path(entry.path))
    for name, folders in found.items():
        logger.info("ending what a dead owner left in control group %s", name)
        Group(folders, homes.version).end()
    return len(found)
