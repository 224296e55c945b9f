"""By which means the limits of a box hold on this machine, and the signs that one of them stopped a command.

A control group holds for all processes of a box together. Where none may be made, a limit of memory, of processor
time or of a share of the processors is refused: ``setrlimit`` would bound each process alone, and a box makes as many
as it likes. It holds sizes of files, addresses of a process, and the number of processes where a box has users of
its own.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Final

from wingbeat.core.errors import ConfigError
from wingbeat.resources.backends.limits_cgroups import Counters, GroupLimits
from wingbeat.resources.backends.limits_homes import CPU, CPUACCT, MEMORY, PIDS, Homes
from wingbeat.resources.specs import BoxSpec, UnsupportedField

MIB: Final = 2**20
NPROC_KERNEL: Final = (5, 14)
"""Since then each user namespace counts its own processes."""
SIGXCPU, SIGXFSZ = 24, 25
DELEGATE: Final = "let this user make control groups (systemd-run --user --scope -p Delegate=yes COMMAND)"

_SIGNS = {
    "file": (b"File too large",),
    "disk": (b"No space left on device",),
    "memory": (b"MemoryError", b"Cannot allocate memory", b"out of memory"),
    "pids": (b"Resource temporarily unavailable", b"Cannot fork", b"can't start new thread"),
}
"""What programs say when a system call fails for want of room."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The means for one box; -1: not limited."""

    group: GroupLimits
    memory_bytes: int = -1
    """Addresses of one process."""
    processes: int = -1
    file_bytes: int = -1
    cpu_s: int = -1
    """Of one process."""

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """As the box's first process wants them."""
        return self.cpu_s, self.file_bytes, self.memory_bytes, self.processes


def plan_limits(spec: BoxSpec, homes: Homes, *, pids: int | None, uncounted: str = "") -> Plan:
    """How a box is held to its spec here; ``pids`` is its limit of processes with the back-end's default.

    ``uncounted``: why RLIMIT_NPROC does not hold such a box, and what to do; "": it does.
    Raises UnsupportedField for a limit that nothing on this machine can hold.
    """
    why = f"no control group can be made for it here ({homes.reason or 'the kernel has no such controller'})"
    for name, controller, instead in (
        ("memory_mb", MEMORY, "process_memory_mb bounds each process instead"),
        ("cpus", CPU, "leave it out"),
        ("cpu_s", CPUACCT, "command_timeout_s bounds each command instead"),
    ):
        if getattr(spec, name) is not None and controller not in homes:
            raise UnsupportedField(spec.kind, name, f"{why}; {instead}, or {DELEGATE}")
    has_pids_group = pids is not None and PIDS in homes
    if pids is not None and not has_pids_group:
        which = f"{pids} processes, as the spec says" if spec.pids is not None else f"{pids} processes, its default"
        if uncounted:
            raise UnsupportedField(spec.kind, "pids", f"nothing would hold {which}: {why}, and {uncounted}")
        if spec.pids is not None and kernel() < NPROC_KERNEL:
            raise UnsupportedField(
                spec.kind, "pids", f"{why}, and RLIMIT_NPROC counts other processes of this user too; leave it out"
            )
    return Plan(
        group=GroupLimits(
            memory_bytes=None if spec.memory_mb is None else spec.memory_mb * MIB,
            pids=pids if has_pids_group else None,
            cpus=spec.cpus,
            counts_cpu=spec.cpu_s is not None,
            holds_together=PIDS in homes,
        ),
        memory_bytes=-1 if spec.process_memory_mb is None else spec.process_memory_mb * MIB,
        processes=-1 if pids is None or has_pids_group else pids + 1,  # its first process
        file_bytes=-1 if spec.file_mb is None else spec.file_mb * MIB,
        cpu_s=-1 if spec.cpu_s is None else math.ceil(spec.cpu_s),
    )


@functools.cache
def kernel() -> tuple[int, int]:
    """Its version."""
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int("".join(c for c in minor if c.isdecimal()) or 0)


def stopped_by(
    plan: Plan, *, exit_code: int, stderr: bytes, is_full: bool, before: Counters, after: Counters
) -> str | None:
    """The limit that made a command fail, by what the kernel counted and else by what the command said.

    None for one that succeeded: it may have met a limit, but that did not stop it.
    """
    if exit_code == 0:
        return None
    if after.memory_kills > before.memory_kills:
        return "memory"
    if after.pids_refused > before.pids_refused:
        return "pids"
    if plan.cpu_s >= 0 and exit_code in (-SIGXCPU, 128 + SIGXCPU):
        return "cpu"
    if plan.file_bytes >= 0 and (exit_code in (-SIGXFSZ, 128 + SIGXFSZ) or _says(stderr, "file")):
        return "file"
    if is_full or _says(stderr, "disk"):
        return "disk"
    if plan.memory_bytes >= 0 and _says(stderr, "memory"):
        return "memory"
    if plan.processes >= 0 and _says(stderr, "pids"):
        return "pids"
    return None


def _says(stderr: bytes, limit: str) -> bool:
    return any(sign in stderr for sign in _SIGNS[limit])


def check_place(spec: BoxSpec, path: str, field: str) -> None:
    """Raises ConfigError for a path in a box that would hide what programs need."""
    parts = path.split("/")
    if not {"", ".", ".."}.isdisjoint(parts[1:]) and path != "/":
        raise ConfigError(f"resource kind {spec.kind!r}: {field}: expected a path in its shortest form, got {path!r}")
    taken = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys", "run", "tmp", "var")
    if path == "/" or (parts[1] in taken and (field == "workdir" or parts[1] not in ("run", "var", "usr"))):
        raise ConfigError(f"resource kind {spec.kind!r}: {field}: expected another place, {path} is the system's")
