"""A thousand episodes at once from twenty client processes: ``python -m bench.swarm_scale [--minutes 2] [--quick]``.

Control and the SDK are real; the engine is a script whose replies take 0.5 to 5 s, and that says a trainer's part,
too.  The last line of output is one JSON object; the exit code is 1 where a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

from bench.machine import cpu_seconds, describe_machine, status_kib
from bench.scripted_server import OPENER, ScriptedServer, scripted_server
from bench.scripts import Reply, ScriptedCall
from bench.swarm_client import GRACE_S, NUM_TURNS, TOOL_S
from wingbeat import AsyncSwarm, Task
from wingbeat.dataflow.ledger_reader import open_read_only

DELAYS_S, QUICK_DELAYS_S = (0.5, 5.0), (0.05, 0.5)
SPARE = 1.05
"""Concurrency over the number that is to run: between one episode and the next a slot is empty for a moment."""
SAMPLE_S = 0.5
RAMP_S = 120.0
STOP_S = GRACE_S + 30.0
PEAK_BAR, P99_BAR_MS, RSS_BAR_MB = 1000, 250.0, 2048.0
SLOPE_BAR_MB_PER_MIN, SLOPE_MINUTES = 5.0, 10.0
"""Flat is so much at most; judged in runs of so many minutes or more, since a server first fills up what it remembers
of episodes that have ended (20,000 of them)."""
CALLS = ("lease", "begin", "finish", "status")
SOURCE = "swarm"
GROUP_SIZE, GROUPS_PER_STEP, STALENESS = 8, 32, 7
DESCRIPTION = (
    "{clients} client processes with the SDK's runner, {concurrency} episodes at once in each, {turns} turns an"
    " episode, replies of a scripted engine after {replies[0]:g} to {replies[1]:g} s, tools of {tools[0]:g} to"
    " {tools[1]:g} s between them. concurrent_peak: open episodes, as the server counts them. lost_episodes: begun by"
    " some client and not acknowledged as finished, or acknowledged and not in the ledger. control_p99_ms: of all calls"
    " of /api ({calls}) while the full number ran, from the clients' side, retries and the clients' own waiting for a"
    " core included; a lease that waited for work is none of them. with_ramp_p99_ms: the same with those of the start,"
    " where each client begins all of its episodes at once, and of the end. rss_mb: control's memory, at most."
    " rss_slope_mb_per_min: of its least-squares line over the second half of the time at the full number."
)


@dataclass(slots=True)
class Samples:
    """Control as it was while the clients ran."""

    open_episodes: list[int] = field(default_factory=list[int])
    rss: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(seconds, MB)."""
    full_s: float | None = None
    """When the full number was reached, on the same clock; None: never."""
    full: tuple[float, float] = (0.0, math.inf)
    """From when to when the full number ran, in Unix time."""


@dataclass(frozen=True, slots=True)
class Swarm:
    """How large a run is."""

    minutes: float = 1.5
    """At full strength."""
    clients: int = 20
    episodes: int = PEAK_BAR
    delays_s: tuple[float, float] = DELAYS_S
    tool_s: tuple[float, float] = TOOL_S
    stagger_s: float = 2.0
    """Between the starts of two clients: a job scheduler takes longer."""

    @property
    def concurrency(self) -> int:
        """Of each client."""
        return math.ceil(self.episodes * SPARE / self.clients)


FULL = Swarm()
QUICK = Swarm(minutes=0.02, clients=2, episodes=20, delays_s=QUICK_DELAYS_S, tool_s=(0.0, 0.0), stagger_s=0.1)


def make_script(seed: int, delays_s: tuple[float, float]) -> Callable[[ScriptedCall], Reply]:
    """Replies of some words that take their time."""
    rng = random.Random(seed)
    words = ("there", "are", "seven", "of", "them", "and", "it", "takes", "a", "while")

    def script(call: ScriptedCall) -> Reply:
        text = " ".join(rng.choices(words, k=rng.randint(4, 12)))
        return Reply(text, delay_s=rng.uniform(*delays_s))

    return script


@contextlib.contextmanager
def client_processes(url: str, swarm: Swarm, *, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All clients, started one after another; whatever happens, none outlives the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(swarm.clients):
            command = [sys.executable, "-m", "bench.swarm_client", "--server", url]
            command += ["--concurrency", str(swarm.concurrency), "--tool-s", *map(str, swarm.tool_s)]
            command += ["--probe"] if index == 0 else []
            with (folder / f"client-{index}.log").open("wb") as log:
                report = ("--report", str(folder / f"client-{index}.json"))
                processes.append(subprocess.Popen([*command, *report], env=environment, stdout=log, stderr=log))
            time.sleep(swarm.stagger_s)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def stop_clients(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let their episodes end.  Raises RuntimeError where one does not end well."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        if (code := process.wait(STOP_S)) != 0:
            raise RuntimeError(f"a client ended with exit code {code}")


def watch_server(server: ScriptedServer, *, wanted: int, seconds: float) -> Samples:
    """Sample control until it has run for so long at full strength, or the ramp has taken too long."""
    samples = Samples()
    began_s = time.monotonic()
    while True:
        now_s = time.monotonic() - began_s
        samples.rss.append((now_s, status_kib("VmRSS", server.pid) / 1024))
        if (found := open_episodes(server.url)) is not None:
            samples.open_episodes.append(found)
            if samples.full_s is None and found >= wanted:
                samples.full_s, samples.full = now_s, (time.time(), math.inf)
        if now_s > seconds + (RAMP_S if samples.full_s is None else samples.full_s):
            samples.full = (samples.full[0], time.time())
            return samples
        time.sleep(SAMPLE_S)


def open_episodes(url: str) -> int | None:
    """As the server counts them; None where it does not answer in time."""
    try:
        with OPENER.open(f"{url}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
    except (urllib.error.URLError, OSError):
        return None
    return next(int(float(line.split()[1])) for line in lines if line.startswith("wingbeat_open_episodes "))


def slope_mb_per_min(rss: Sequence[tuple[float, float]], *, after_s: float) -> float:
    """Of the least-squares line; 0 where there are too few samples."""
    late = [(at_s / 60, mb) for at_s, mb in rss if at_s >= after_s]
    return linear_regression(*zip(*late, strict=True)).slope if len(late) > 2 else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so much of them do not exceed; 0 of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def missing_in(ledger: Path, acknowledged: set[str]) -> int:
    """Acknowledged finishes of which the ledger has no record."""
    lost = 0
    with open_read_only(ledger) as reader:
        for name in acknowledged:
            episode_id, _, attempt = name.rpartition(":")
            views = reader.episode(episode_id)
            lost += not any(view.attempt == int(attempt) and view.record is not None for view in views)
    return lost


def report(clients: Sequence[Mapping[str, Any]], samples: Samples, *, missing: int, minutes: float) -> dict[str, Any]:
    """All keys but those of the machine."""
    calls = {call: [found for client in clients for found in client["calls"].get(call, ())] for call in CALLS}
    begin_s, end_s = samples.full
    seconds = {name: [s for at, s in found if begin_s <= at - s and at < end_s] for name, found in calls.items()}
    everything = [s for found in seconds.values() for s in found]
    with_ramp = [s for found in calls.values() for _, s in found]
    begun = sum(client["begun"] for client in clients)
    acknowledged = sum(len(client["acknowledged"]) for client in clients)
    slope = slope_mb_per_min(samples.rss, after_s=((samples.full_s or 0.0) + samples.rss[-1][0]) / 2)
    summary: dict[str, Any] = {
        "concurrent_peak": max(samples.open_episodes, default=0),
        "lost_episodes": begun - acknowledged + missing,
        "control_p99_ms": round(1e3 * percentile(everything, 0.99), 1),
        "rss_mb": round(max(mb for _, mb in samples.rss), 1),
        "rss_slope_mb_per_min": round(slope, 2),
        "episodes": acknowledged,
        "refused": sum(client["refused"] for client in clients),
        "control_p50_ms": round(1e3 * percentile(everything, 0.5), 1),
        "with_ramp_p99_ms": round(1e3 * percentile(with_ramp, 0.99), 1),
        "p99_ms_by_call": {call: round(1e3 * percentile(found, 0.99), 1) for call, found in seconds.items()},
        "calls": {call: len(found) for call, found in seconds.items()},
        "clients_cpu_s": round(sum(client["cpu_s"] for client in clients), 1),
    }
    summary["bars"] = {
        f"concurrent_peak >= {PEAK_BAR}": summary["concurrent_peak"] >= PEAK_BAR,
        "lost_episodes = 0": summary["lost_episodes"] == 0,
        f"control_p99_ms <= {P99_BAR_MS:.0f}": summary["control_p99_ms"] <= P99_BAR_MS,
        f"rss_mb <= {RSS_BAR_MB:.0f}": summary["rss_mb"] <= RSS_BAR_MB,
    }
    if minutes >= SLOPE_MINUTES:
        name = f"rss_slope_mb_per_min <= {SLOPE_BAR_MB_PER_MIN:.0f}"
        summary["bars"][name] = summary["rss_slope_mb_per_min"] <= SLOPE_BAR_MB_PER_MIN
    return summary


def measure(swarm: Swarm, *, seed: int, folder: Path) -> dict[str, Any]:
    """One run and its report."""
    settings = {
        "server.heartbeat_s": 10.0,
        "dataflow.group_size": GROUP_SIZE,
        "dataflow.groups_per_step": max(1, GROUPS_PER_STEP * swarm.episodes // PEAK_BAR),
        "dataflow.max_staleness": STALENESS,
    }
    with scripted_server(folder, make_script(seed, swarm.delays_s), settings=settings) as server:
        asyncio.run(put_tasks(server.url))
        with client_processes(server.url, swarm, folder=folder) as processes:
            samples = watch_server(server, wanted=swarm.episodes, seconds=60.0 * swarm.minutes)
            stop_clients(processes)
        control_cpu_s = cpu_seconds(server.pid)
    seen = [json.loads(path.read_bytes()) for path in sorted(folder.glob("client-*.json"))]
    acknowledged = {name for client in seen for name in client["acknowledged"]}
    missing = missing_in(server.run_dir / "ledger.sqlite", acknowledged)
    summary = report(seen, samples, missing=missing, minutes=swarm.minutes)
    description = DESCRIPTION.format(
        clients=swarm.clients,
        concurrency=swarm.concurrency,
        turns=NUM_TURNS,
        replies=swarm.delays_s,
        tools=swarm.tool_s,
        calls=", ".join(CALLS),
    )
    return {"description": description, **summary, "control_cpu_s": round(control_cpu_s, 1)}


async def put_tasks(url: str) -> None:
    """Few tasks, which are dealt again and again."""
    async with AsyncSwarm(url) as swarm:
        await swarm.put_tasks(SOURCE, [Task(SOURCE, str(index), {}) for index in range(256)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.swarm_scale", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=FULL.minutes, help="at full strength; 10 judge the slope of memory"
    )
    parser.add_argument("--clients", type=int, default=FULL.clients, help="client processes")
    parser.add_argument("--episodes", type=int, default=FULL.episodes, help="episodes at once")
    parser.add_argument("--seed", type=int, default=0, help="of the replies")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few clients and episodes, seconds")
    parser.add_argument("--keep", type=Path, default=None, help="a new folder in which logs are kept")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    swarm = QUICK if quick else Swarm(arguments.minutes, arguments.clients, arguments.episodes)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wingbeat-swarm-") as temporary:
        folder: Path = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        summary = measure(swarm, seed=arguments.seed, folder=folder)
    summary |= {
        "quick": quick,
        "minutes": swarm.minutes,
        "seed": arguments.seed,
        "elapsed_s": round(time.monotonic() - started, 1),
        "machine": describe_machine(),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.exit(0 if quick or all(summary["bars"].values()) else 1)


if __name__ == "__main__":
    main()
