"""What workers compute with: how many cores there are, and which accelerators of this machine each of them sees.

Workers take the first devices that they see, so one that should use others must not see the first ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
"""ROCm builds of torch honour it, too."""
_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a worker computes with."""

    threads: int = 1
    """Of each rank."""
    devices: int = 1
    """Accelerators, one for each rank; 0 where its configuration keeps it on the CPU."""
    ranks: int = 1
    """Processes that compute together."""
    insists: bool = False
    """Its configuration names the kind of accelerator: it cannot run without."""
    grace_s: float = 0.0
    """Once its supervisor is gone, it may go on for so long with what its successor there would need (a port)."""


def needs_of(device: str, *, threads: int, ranks: int) -> Needs:
    """Of a worker whose configuration says ``device``."""
    kind = device.partition(":")[0]
    return Needs(threads, 0 if kind == "cpu" else ranks, ranks=ranks, insists=kind == "cuda")


def usable_cores() -> int:
    """Those this process may run on: containers and batch systems give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_devices(
    environment: Mapping[str, str] = os.environ,
    *,
    folder: Path = _DEVICES,
) -> tuple[str, ...]:
    """Names of the accelerators that this process may use, as the variable spells them; () without any."""
    given = environment.get(VARIABLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip() and name.strip() != "-1")
    numbers = (path.name.removeprefix("nvidia") for path in folder.glob("nvidia*"))
    return tuple(sorted((number for number in numbers if number.isdigit()), key=int))


def assign_devices(wanted: Mapping[str, int], devices: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Devices of each worker: its own while there are enough, else the least shared ones, in the order given.

    A worker that wants more than there are gets all of them: it says itself what it lacks.
    """
    users = dict.fromkeys(devices, 0)
    assigned: dict[str, tuple[str, ...]] = {}
    for worker, count in wanted.items():
        chosen = sorted(users, key=lambda device: (users[device], devices.index(device)))[:count]
        for device in chosen:
            users[device] += 1
        assigned[worker] = tuple(sorted(chosen, key=devices.index))
    return assigned
