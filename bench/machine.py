"""What benchmarks tell of the machine they ran on, and read of its processes (from Linux's ``/proc``)."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, Any]:
    """Goes into every report."""
    return {"cpus": os.cpu_count(), "load_average": os.getloadavg(), "python": platform.python_version()}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its living descendants, all threads."""
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    family = {pid}
    while grown := {child for child, (parent, _) in parents.items() if parent in family} - family:
        family |= grown
    return sum(parents[member][1] for member in family if member in parents)


def status_kib(name: str, pid: int | None = None) -> int:
    """``VmRSS`` (memory now) or ``VmHWM`` (its peak) of a process, by default this one."""
    lines = Path(f"/proc/{'self' if pid is None else pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
