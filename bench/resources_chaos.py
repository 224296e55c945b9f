"""Sandboxes under a hail of faults: nothing leaks, nothing dirty is handed out, nothing becomes a reward.

Episodes lease sandboxes that serve again after a reset, and run commands in them. In a quarter of them something
goes wrong, drawn beforehand: 10% hang (half of them a command that never ends, half the whole sandbox, stopped from
outside), 10% are killed from outside, 5% leave their sandbox corrupted (files, links, processes, objects in the
kernel). An episode whose sandbox fails is tried again; one whose command fails has its result.

Keys: ``leaked`` processes and control groups at the end; ``dirty_reuse`` sandboxes handed out with traces of an
earlier episode; ``lost`` episodes without a result; ``infra_as_reward`` faults of infrastructure that an episode
saw as the result of its command; ``throughput_vs_calm`` against the same episodes without faults.

Run: ``python -m bench.resources_chaos [--quick]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from wingbeat.resources import ResourceFailed, Resources, Reuse, SandboxSpec
from wingbeat.resources.backends.limits_homes import PREFIX, find_homes
from wingbeat.resources.backends.sandbox_process import children_of
from wingbeat.resources.boxes import Box

SLOTS = 16
COMMANDS = 10
COMMAND = "cat seed; sleep 0.05"
MAX_TRIES = 10

SPEC = SandboxSpec(
    limit=SLOTS,
    reuse=Reuse.AFTER_RESET,
    memory_mb=96,
    pids=64,
    files={"seed": "seed"},
    command_timeout_s=1.0,
    reset_timeout_s=10.0,
)
TRACES = (
    "echo dirt > seed; mkdir -p a/b; chmod 0 a; ln -s / everywhere; echo dirt > /tmp/dirt; (setsid sleep 1000 &)",
    "python3 -c 'import ctypes; ctypes.CDLL(None).shmget(1, 4096, 0o1600)'; echo dirt > /dev/shm/dirt",
)
"""What corrupts: one that a reset repairs, one that no reset can."""
LOOK = "cat seed; ls -A . /tmp /dev/shm; set -- /proc/[0-9]*; echo $# $(grep -c . /proc/sysvipc/shm)"
CLEAN = b"seed.:\nseed\n\n/dev/shm:\n\n/tmp:\n2 1\n"


class Fault(StrEnum):
    """What goes wrong in an episode."""

    NONE = "none"
    COMMAND_HANGS = "command_hangs"
    BOX_HANGS = "box_hangs"
    KILLED = "killed"
    CORRUPTED = "corrupted"


@dataclass(slots=True)
class Tally:
    """What happened."""

    seen: Counter[str] = field(default_factory=Counter)
    results: dict[int, bool] = field(default_factory=dict)
    """Episode -> whether its commands did what they should."""

    def count(self, name: str) -> None:
        self.seen[name] += 1


def chaos(quick: bool) -> dict[str, Any]:
    """Measures; see the module."""
    num_episodes = 48 if quick else 256
    calm_s, calm = asyncio.run(_run([Fault.NONE] * num_episodes))
    faults = draw(num_episodes, random.Random(7))
    chaos_s, tally = asyncio.run(_run(faults))
    expected = {number: fault is not Fault.COMMAND_HANGS for number, fault in enumerate(faults)}
    wrong = sum(tally.results.get(number) not in (None, good) for number, good in expected.items())
    return {
        "faults": dict(Counter(map(str, faults))),
        "leaked": calm.seen["leaked"] + tally.seen["leaked"],
        "dirty_reuse": calm.seen["dirty_reuse"] + tally.seen["dirty_reuse"],
        "lost": 2 * num_episodes - len(calm.results) - len(tally.results),
        "infra_as_reward": wrong + tally.seen["infra_as_reward"] + sum(not good for good in calm.results.values()),
        "retries": tally.seen["retries"],
        "quarantined": tally.seen["quarantined"],
        "calm_s": calm_s,
        "chaos_s": chaos_s,
        "throughput_vs_calm": calm_s / chaos_s,
    }


def draw(count: int, rng: random.Random) -> list[Fault]:
    """The same number of each fault for the same count, in a random order."""
    faults = [
        *[Fault.COMMAND_HANGS] * round(count * 0.05),
        *[Fault.BOX_HANGS] * round(count * 0.05),
        *[Fault.KILLED] * round(count * 0.1),
        *[Fault.CORRUPTED] * round(count * 0.05),
    ]
    faults += [Fault.NONE] * (count - len(faults))
    rng.shuffle(faults)
    return faults


async def _run(faults: list[Fault]) -> tuple[float, Tally]:
    tally = Tally()
    left = iter(enumerate(faults))
    with tempfile.TemporaryDirectory() as folder:
        async with Resources(ledger=Path(folder)) as pool:

            async def slot() -> None:
                for number, fault in left:
                    await _episode(pool, number, fault, tally)

            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(SLOTS):
                    group.create_task(slot())
            seconds = time.perf_counter() - began
            tally.seen["quarantined"] = sum(stats.quarantined for stats in pool.snapshot())
        tally.seen["leaked"] = num_left()
    return seconds, tally


async def _episode(pool: Resources, number: int, fault: Fault, tally: Tally) -> None:
    """One episode, tried again as long as its sandbox fails; a fault strikes its first try only."""
    for attempt in range(MAX_TRIES):
        try:
            async with pool.lease(SPEC, owner=f"episode-{number}-{attempt}") as lease:
                tally.results[number] = await _work(lease.value, number, fault, tally)
                return
        except ResourceFailed:
            tally.count("retries")
            fault = Fault.NONE


async def _work(box: Box, number: int, fault: Fault, tally: Tally) -> bool:
    """The commands of an episode, with its fault in their midst; whether all went well."""
    looked = await box.run(LOOK)
    if looked.stdout != CLEAN:
        tally.count("dirty_reuse")
    strikes_at = number % COMMANDS
    for step in range(COMMANDS):
        if step != strikes_at or fault in (Fault.NONE, Fault.CORRUPTED):
            done = await box.run(COMMAND)
            if not (done.ok and done.stdout == b"seed"):
                return False
        elif fault is Fault.COMMAND_HANGS:
            return (await box.run("sleep 1000")).stopped_by != "timeout"
        else:
            strike(box, fault)
            await box.run(COMMAND)
            tally.count("infra_as_reward")  # the sandbox was gone, so no command can have had a result
    if fault is Fault.CORRUPTED:
        await box.run(TRACES[number % 2])
    return True


def strike(box: Any, fault: Fault) -> None:
    """What comes from outside: the sandbox's processes are killed, or its first one is stopped."""
    outer = box.process_id
    if fault is Fault.KILLED:
        os.kill(outer, signal.SIGKILL)
        return
    for inner in children_of(outer):
        os.kill(inner, signal.SIGSTOP)


def num_left() -> int:
    """Processes and control groups of sandboxes of this process that still exist."""
    groups = {
        path for folder in set(find_homes().folders.values()) for path in folder.glob(f"{PREFIX}*-{os.getpid()}-*")
    }
    processes = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                processes += command.startswith(b"/usr/bin/bwrap\0") and int(name) in children_of(os.getpid())
    return len(groups) + processes


def main() -> None:
    """Prints the figures as JSON."""
    sys.stdout.write(json.dumps({**chaos("--quick" in sys.argv[1:]), "machine": describe_machine()}) + "\n")


if __name__ == "__main__":
    main()
