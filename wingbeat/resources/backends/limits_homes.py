"""Where control groups may be made, and how their names say whose they are.

Below the group that this process is in (v1), or below the nearest one that may have groups beside processes (v2): so
whatever limits this process also limits its boxes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wingbeat.core.process_facts import start_time
from wingbeat.resources.specs import ResourceFailed

MEMORY, PIDS, CPU, CPUACCT = "memory", "pids", "cpu", "cpuacct"
CONTROLLERS = (MEMORY, PIDS, CPU, CPUACCT)
"""In v1's words; v2 accounts processor time (``cpuacct``) in every group."""
PREFIX = "wingbeat-"

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
    probe = folder / new_name()
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return (error.strerror or "cannot be written").lower()
    return None


# --- whose


def owner_mark() -> str:
    """Names this process, for all time."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-{start_time(os.getpid())}"


def hint_of(error: OSError) -> str:
    """What to do about an error of the system, where it does not say so itself."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "; no file descriptor is left: raise their limit (ulimit -n), or lease fewer boxes at once"
    return ""


def new_name() -> str:
    """Of a new group: it says whose it is."""
    return f"{PREFIX}{owner_mark()}-{next(_numbers)}"


def is_abandoned(name: str, prefix: str = PREFIX) -> bool:
    """Whether it is something of ours (``PREFIX MARK-REST``) whose owner is gone; those of other process namespaces
    are not ours to judge."""
    parts = name.removeprefix(prefix).split("-")
    if not name.startswith(prefix) or len(parts) != 4 or not all(part.isdecimal() for part in parts[:3]):
        return False
    namespace, pid, began = map(int, parts[:3])
    return namespace == os.stat("/proc/self/ns/pid").st_ino and start_time(pid) != began
