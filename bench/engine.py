"""The embedded engine against transformers, on one CPU machine: ``python -m bench.engine [--quick]``.

Every (system, threads) pair is a process of its own, with its thread count fixed before torch loads.  Only
one works at a time and they take turns at every measurement, so that a busy machine is unfair to none.
The last line of output is one JSON object; useful tokens are the sampled tokens that the workload asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

OURS = "embedded"
THEIRS = ("generate", "generate_batch")
TRACE_BAR = (64, 1.5)
EQUAL_BAR = 0.8
HOPELESS = 3.0
"""A worker so many times slower than its single-threaded twin is not measured further."""
DESCRIPTION = (
    "Useful (asked-for) sampled tokens per second of wall time on a Qwen3 of 4 layers, hidden size 256, 3.28M "
    "parameters, float32, random weights, temperature 1. equal: requests of 32 prompt + 128 sampled tokens. trace: "
    "episodes of 3 turns in groups of 8, 64 system + 32 task tokens shared, 16-token tool results, log-normal lengths "
    "(median 24, clipped to 4..256); a turn's prompt is everything before it. ours: the embedded engine, logprobs "
    "included, best of 1 and 2 threads. hf: the best of transformers generate (left-padded batches, turn by turn, "
    "each stopped at its longest) and of the continuous batching behind generate_batch (fed like ours), with 1 and 2 "
    "threads. Each figure is the best of the repeats."
)


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: a workload, at so many requests in flight, drawn with a seed."""

    workload: str
    concurrency: int
    episodes: int
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a job took."""

    tokens: int
    """Useful tokens."""
    wall_s: float
    cpu_s: float


def jobs(*, quick: bool, repeats: int) -> list[Job]:
    """What every system serves, in order; the same for all.

    Single requests are short and feel every disturbance, so they are measured more often.
    """
    sizes = {1: (1, 1, 4), 16: (16, 24, 1), 64: (64, 96, 1)}
    if quick:
        sizes = {1: (1, 1, 2), 16: (16, 16, 1)}
    return [
        Job(workload, concurrency, count, seed)
        for repeat in range(repeats)
        for concurrency, (equal, trace, times) in sizes.items()
        for seed in range(repeat * times, (repeat + 1) * times)
        for workload, count in (("equal", equal), ("trace", trace))
    ]


class Worker:
    """A process that serves jobs with one system at one thread count; ready once constructed."""

    def __init__(self, system: str, *, threads: int) -> None:
        self.system = system
        self.threads = threads
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.engine", "--worker", system, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._read()

    def measure(self, job: Job) -> Result:
        """Serve one job.  Raises RuntimeError if the worker died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return Result(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.system} x{self.threads} died with exit code {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def work(system: str, *, threads: int) -> None:
    """A worker's life: a line when ready, then one JSON job per input line, one JSON result per output line."""
    import torch

    from bench.systems import SYSTEMS, build_model
    from bench.workloads import Episode, equal_workload, trace_workload, useful_tokens

    torch.set_num_threads(threads)
    serve = SYSTEMS[system](build_model())
    makers = {"equal": equal_workload, "trace": trace_workload}
    serve([Episode("warm-up", list(range(8)), (8,), ())], 1)
    _say({})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        episodes = makers[job.workload](job.episodes, seed=job.seed)
        tokens = useful_tokens(episodes)
        wall, cpu = time.perf_counter(), time.process_time()
        serve(episodes, job.concurrency)
        _say(asdict(Result(tokens, time.perf_counter() - wall, time.process_time() - cpu)))


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


Results = dict[tuple[str, int, Job], Result]


def measure_all(todo: Sequence[Job], threads: Sequence[int]) -> tuple[Results, list[str]]:
    """Every job on every worker, taking turns; also the workers given up.

    Two threads on a machine without two idle cores can be tens of times slower than one.  Such a worker is
    given up after the job that shows it: it could not have been the best of its side.
    """
    results: Results = {}
    given_up: list[str] = []
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(system, threads=count)) for system in (OURS, *THEIRS) for count in threads
        ]
        for job in todo:
            for worker in tuple(workers):
                result = results[worker.system, worker.threads, job] = worker.measure(job)
                name = f"{worker.system} x{worker.threads}"
                rate = result.tokens / result.wall_s
                sys.stderr.write(f"{job.workload} at {job.concurrency}: {name}: {rate:.0f} tok/s\n")
                if result.wall_s > HOPELESS * results[worker.system, threads[0], job].wall_s:
                    workers.remove(worker)
                    given_up.append(name)
    return results, given_up


def report(results: Results, *, given_up: list[str], quick: bool, elapsed_s: float) -> dict[str, Any]:
    """The JSON object: the compared figures, the bars, and every system's own figures."""
    best: dict[tuple[str, str, str], dict[str, float]] = {}
    for (system, threads, job), result in results.items():
        cell = best.setdefault((job.workload, str(job.concurrency), f"{system}x{threads}"), {"wall": 0.0, "cpu": 0.0})
        cell["wall"] = max(cell["wall"], round(result.tokens / result.wall_s, 1))
        cell["cpu"] = max(cell["cpu"], round(result.tokens / result.cpu_s, 1))
    out: dict[str, Any] = {"description": DESCRIPTION}
    detail: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for workload in ("equal", "trace"):
        table: dict[str, dict[str, float]] = {"ours": {}, "hf": {}, "ratio": {}}
        for (name, concurrency, system), cell in best.items():
            if name == workload:
                side = "ours" if system.startswith(f"{OURS}x") else "hf"
                table[side][concurrency] = max(table[side].get(concurrency, 0.0), cell["wall"])
                detail.setdefault(workload, {}).setdefault(concurrency, {})[system] = cell
        table["ratio"] = {c: round(table["ours"][c] / table["hf"][c], 3) for c in table["ours"]}
        out[workload] = table
    out["bars"] = _bars(out["equal"]["ratio"], out["trace"]["ratio"])
    out["tokens_per_second_by_system"] = detail
    out["given_up"] = given_up
    out["quick"] = quick
    out["elapsed_s"] = round(elapsed_s, 1)
    out["machine"] = {"cpus": os.cpu_count(), "load_average": os.getloadavg(), "python": platform.python_version()}
    return out


def _bars(equal: dict[str, float], trace: dict[str, float]) -> dict[str, bool | None]:
    """Whether each bar holds; None where this run did not measure it."""
    concurrency, bar = TRACE_BAR
    at = trace.get(str(concurrency))
    return {
        f"trace ratio >= {bar} at {concurrency}": None if at is None else at >= bar,
        f"equal ratio >= {EQUAL_BAR} everywhere": all(ratio >= EQUAL_BAR for ratio in equal.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: less of everything, not up to 64")
    parser.add_argument("--repeats", type=int, default=2, help="passes over all measurements; the best counts")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, threads=arguments.threads)
        return
    started = time.perf_counter()
    repeats = 1 if arguments.quick else arguments.repeats
    threads = (1,) if arguments.quick else (1, 2)
    results, given_up = measure_all(jobs(quick=arguments.quick, repeats=repeats), threads)
    elapsed_s = time.perf_counter() - started
    summary = report(results, given_up=given_up, quick=arguments.quick, elapsed_s=elapsed_s)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
