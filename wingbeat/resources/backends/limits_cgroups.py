"""Control groups: what holds a box to its limits however many processes it makes.

A box has one group for what runs in it, made below the group that this process is in (v1) or below the nearest
one that may have groups beside processes (v2). So whatever limits this process also limits its boxes. A group's
name says whose it is, and groups of owners that are gone are removed by whoever makes the next one.

Processes enter by themselves, before they become the command, through files that the owner opened: nothing in a
box may write to control groups, and none needs to be seen there.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wingbeat.core.process_facts import start_time
from wingbeat.resources.specs import ResourceFailed

logger = logging.getLogger("wingbeat.resources")

MEMORY, PIDS, CPU, CPUACCT = "memory", "pids", "cpu", "cpuacct"
CONTROLLERS = (MEMORY, PIDS, CPU, CPUACCT)
"""In v1's words; v2 accounts processor time (``cpuacct``) in every group."""
PREFIX = "wingbeat-"
PERIOD_US = 100_000
REMOVE_S = 5.0
"""The kernel lets go of a group shortly after its last process."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Homes:
    """Where groups may be made."""

    version: int
    """1, 2; 0: nowhere."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Controller -> the folder that gets a box's group."""
    reason: str = ""
    """Why a controller is not among them."""

    def __contains__(self, controller: str) -> bool:
        return controller in self.folders


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


# --- where ---------------------------------------------------------------------------------------------------------


def find_homes(*, proc: Path = Path("/proc/self")) -> Homes:
    """Looks at what this process is in and tries what it may do there; leaves nothing behind.

    Raises ResourceFailed where it cannot be looked up now, which must not be taken for there being none.
    """
    try:
        mounts = list(_mounts((proc / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape")))
        own = _own_groups((proc / "cgroup").read_text(encoding="utf-8", errors="surrogateescape"))
        first = _find_v1(mounts, own)
        if first.folders:
            return first
        second = _find_v2(mounts, own)
    except OSError as error:
        if hint := hint_of(error):
            raise ResourceFailed(f"control groups cannot be looked up: {error}{hint}") from error
        return Homes(0, reason=f"control groups cannot be looked up: {error.strerror}")
    return second if second.folders or not first.reason else first


@dataclass(frozen=True, slots=True)
class _Mount:
    controllers: frozenset[str]
    """Empty: v2."""
    root: str
    """The group that the mount shows as its root."""
    at: Path


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        words = head.split()
        names = frozenset(options.split()[-1].split(",")) & frozenset(CONTROLLERS) if kind == "cgroup" else frozenset()
        if kind == "cgroup2" or names:
            yield _Mount(names, root=words[3], at=Path(words[4].replace("\\040", " ")))


def _own_groups(cgroup: str) -> dict[str, str]:
    """Controller ("" for v2) -> the group that this process is in."""
    found: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found


def _folder_of(mount: _Mount, group: str) -> Path:
    """The group as the mount shows it; its root where the group lies outside (a container without a namespace)."""
    inside = os.path.relpath(group, mount.root)
    return mount.at if inside == "." or inside.startswith("..") else mount.at / inside


def _find_v1(mounts: Sequence[_Mount], own: Mapping[str, str]) -> Homes:
    folders: dict[str, Path] = {}
    reasons: list[str] = []
    for mount in mounts:
        for controller in sorted(mount.controllers):
            folder = _folder_of(mount, own.get(controller, "/"))
            fault = _fault_of(folder)
            if fault is None:
                folders[controller] = folder
            else:
                reasons.append(f"{folder}: {fault}")
    return Homes(1 if folders else 0, folders, reason="; ".join(reasons))


def _find_v2(mounts: Sequence[_Mount], own: Mapping[str, str]) -> Homes:
    mount = next((mount for mount in mounts if not mount.controllers), None)
    if mount is None:
        return Homes(0, reason="no control groups are mounted")
    folder = _folder_of(mount, own.get("", "/"))
    reason = "no group above this process may be divided"
    if not _words(mount.at / "cgroup.controllers") & {MEMORY, PIDS, CPU}:
        return Homes(0, reason=f"{mount.at} (v2) has none of the controllers {MEMORY}, {PIDS}, {CPU}")
    while folder.is_relative_to(mount.at):
        given = _words(folder / "cgroup.controllers")
        missing = [name for name in (MEMORY, PIDS, CPU) if name in given and name not in _enabled(folder)]
        fault = _fault_of(folder)
        if fault is None:
            for name in missing:  # a group with processes of its own refuses, so the next one up is tried
                with contextlib.suppress(OSError):
                    (folder / "cgroup.subtree_control").write_text(f"+{name}", encoding="ascii")
            enabled = _enabled(folder) & {MEMORY, PIDS, CPU}
            if enabled:
                return Homes(2, dict.fromkeys([*sorted(enabled), CPUACCT], folder))
        else:
            reason = f"{folder}: {fault}"
        if folder == mount.at:
            break
        folder = folder.parent
    return Homes(0, reason=reason)


def _words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text(encoding="ascii").split())
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        return frozenset()


def _enabled(folder: Path) -> frozenset[str]:
    return _words(folder / "cgroup.subtree_control")


def _fault_of(folder: Path) -> str | None:
    """Why no group can be made there."""
    probe = folder / _new_name()
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return (error.strerror or "cannot be written").lower()
    return None


# --- whose ---------------------------------------------------------------------------------------------------------


def owner_mark() -> str:
    """Names this process, for all time."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-{start_time(os.getpid())}"


def hint_of(error: OSError) -> str:
    """What to do about an error of the system, where it does not say so itself."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "; no file descriptor is left: raise their limit (ulimit -n), or lease fewer boxes at once"
    return ""


def _new_name() -> str:
    return f"{PREFIX}{owner_mark()}-{next(_numbers)}"


def is_abandoned(name: str, prefix: str = PREFIX) -> bool:
    """Whether it is something of ours (``PREFIX MARK-REST``) whose owner is gone; those of other process namespaces
    are not ours to judge."""
    parts = name.removeprefix(prefix).split("-")
    if not name.startswith(prefix) or len(parts) != 4 or not all(part.isdecimal() for part in parts[:3]):
        return False
    namespace, pid, began = map(int, parts[:3])
    return namespace == os.stat("/proc/self/ns/pid").st_ino and start_time(pid) != began


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


# --- one -----------------------------------------------------------------------------------------------------------


class Group:
    """The control group of one box: one folder (v2) or one for each controller (v1)."""

    def __init__(self, folders: Sequence[Path], version: int) -> None:
        self.folders = tuple(dict.fromkeys(folders))
        self.version = version

    @classmethod
    def make(cls, homes: Homes, limits: GroupLimits) -> Group:
        """Raises ResourceFailed, and leaves nothing behind."""
        try:
            name = _new_name()
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
