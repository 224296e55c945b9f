"""What the kernel says of processes: who lives, since when, and whose child it is.

An id alone names no process for long: ids are given out again, and mean nothing after a restart of the machine or in
another container.  An id with its start and :func:`boot_id` does.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Of one process, from ``/proc/PID/stat``."""

    state: str
    """One letter: R runs, S sleeps, T stopped, Z ended and not collected …"""
    parent: int
    session: int
    began: int
    """Clock ticks since the machine started."""


def facts_of(pid: int) -> ProcessFacts | None:
    """None where there is no such process, or no ``/proc``.

    Raises OSError where it cannot be told, for want of a file descriptor, say: a process that is not seen for that must
    not be taken for dead.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError, IndexError):
        # The name, in brackets, may hold anything, brackets too.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return ProcessFacts(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))
    return None


def start_time(pid: int) -> int | None:
    """When a living process began, in clock ticks since boot: with its id, a name that nobody takes over.

    One that has ended and whose parent has not looked is none: where nobody collects them it would seem alive for ever.
    """
    facts = facts_of(pid)
    return None if facts is None or facts.state in "ZX" else facts.began


def process_ids() -> list[int]:
    """Of all processes that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def exists(pid: int) -> bool:
    """Whether some process has this id, where nothing more can be told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def boot_id() -> str:
    """Of this start of the machine; "" where the system does not say.  Raises OSError as :func:`facts_of`."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
