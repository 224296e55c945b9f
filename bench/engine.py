"""The embedded engine against transformers, on one CPU machine: ``python -m bench.engine [--quick]``.

Every (system, threads) pair is a process of its own, with its thread count fixed before torch loads.  Only
one works at a time and they take turns at every measurement, so that a busy machine is unfair to none.
The last line of output is one JSON object; useful tokens are the sampled tokens that the workload asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from bench.machine import describe_machine

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
    "threads. Each figure is the best of the repeats. per_cpu_second: the same per second of process CPU time, which a "
    "busy machine disturbs less."
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

    Short measurements feel every disturbance, so they are taken more often.
    """
    plan = [
        ("equal", 1, 1, 4),
        ("trace", 1, 1, 2),
        ("equal", 16, 16, 4),
        ("trace", 16, 24, 1),
        ("equal", 64, 64, 4),
        ("trace", 64, 96, 1),
    ]
    if quick:
        plan = [("equal", 1, 1, 2), ("trace", 1, 1, 1), ("equal", 16, 16, 2), ("trace", 16, 16, 1)]
    return repeated(plan, repeats=repeats)


def repeated(plan: Sequence[tuple[str, int, int, int]], *, repeats: int) -> list[Job]:
    """Jobs of workload, concurrency, episodes and times, each time drawn with another seed."""
    return [
        Job(workload, concurrency, episodes, seed)
        for repeat in range(repeats)
        for workload, concurrency, episodes, times in plan
        for seed in range(repeat * times, (repeat + 1) * times)
    ]


class Worker:
    """A process that serves jobs with one system at one thread count; ready once constructed."""

    def __init__(
        self, system: str, *, threads: int, command: Sequence[str] = (), environment: Mapping[str, str] = {}
    ) -> None:
        """``command`` runs a system that is none of ours; ``environment`` is added to this one's."""
        self.system = system
        self.threads = threads
        self.name = f"{system} x{threads}"
        fixed = {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
        ours = [sys.executable, "-m", "bench.engine", "--worker", system, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command or ours,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **fixed, **environment},
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
            raise RuntimeError(f"worker {self.name} died with exit code {self._process.wait()}")
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
    """A worker process, of one of our systems."""
    import torch

    from bench.engine_work import serve_jobs
    from bench.systems import SYSTEMS, build_model

    torch.set_num_threads(threads)
    serve_jobs(SYSTEMS[system](build_model()), out=sys.stdout)


Results = dict[tuple[str, int, Job], Result]
Table = dict[str, dict[str, float]]


def measure_all(todo: Sequence[Job], threads: Sequence[int]) -> tuple[Results, list[str]]:
    """Every job on every worker, taking turns; also what was given up.

    What cannot become the best of its side is not measured on: a worker far slower than its single-threaded
    twin (two threads without two idle cores can be tens of times slower than one) is given up altogether, one
    far slower than the best of its side is given up for this workload and concurrency.
    """
    results: Results = {}
    given_up: list[str] = []
    hopeless: set[tuple[Worker, str, int]] = set()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(system, threads=count)) for system in (OURS, *THEIRS) for count in threads
        ]
        for job in todo:
            cell = (job.workload, job.concurrency)
            for worker in [w for w in workers if (w, *cell) not in hopeless]:
                result = results[worker.system, worker.threads, job] = worker.measure(job)
                tell_progress(job, worker, result)
                twin = results.get((worker.system, threads[0], job))
                if twin is not None and result.wall_s > HOPELESS * twin.wall_s:
                    workers.remove(worker)
                    given_up.append(worker.name)
            best = min((r.wall_s for (system, _, j), r in results.items() if j == job and system != OURS), default=0.0)
            for worker in workers:
                done = results.get((worker.system, worker.threads, job))
                if worker.system != OURS and done is not None and done.wall_s > HOPELESS * best:
                    hopeless.add((worker, *cell))
                    given_up.append(f"{worker.name} in {job.workload} at {job.concurrency}")
    return results, given_up


def tell_progress(job: Job, worker: Worker, result: Result) -> None:
    rate = result.tokens / result.wall_s
    sys.stderr.write(f"{job.workload} at {job.concurrency}: {worker.name}: {rate:.0f} tok/s\n")


def report(results: Results, *, given_up: list[str], quick: bool, elapsed_s: float) -> dict[str, Any]:
    """The JSON object: the compared figures, the bars, and every system's own figures."""
    best: dict[tuple[str, str, str], dict[str, float]] = {}
    for (system, threads, job), result in results.items():
        cell = best.setdefault((job.workload, str(job.concurrency), f"{system} x{threads}"), {"wall": 0.0, "cpu": 0.0})
        cell["wall"] = max(cell["wall"], round(result.tokens / result.wall_s, 1))
        cell["cpu"] = max(cell["cpu"], round(result.tokens / result.cpu_s, 1))
    equal, trace = (_compare(best, workload, per="wall") for workload in ("equal", "trace"))
    by_system: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for (workload, concurrency, name), cell in best.items():
        by_system.setdefault(workload, {}).setdefault(concurrency, {})[name] = cell
    return {
        "description": DESCRIPTION,
        "equal": equal,
        "trace": trace,
        "bars": _bars(equal["ratio"], trace["ratio"]),
        "per_cpu_second": {workload: _compare(best, workload, per="cpu") for workload in ("equal", "trace")},
        "tokens_per_second_by_system": by_system,
        "given_up": given_up,
        "quick": quick,
        "elapsed_s": round(elapsed_s, 1),
        "machine": describe_machine(),
    }


def _compare(best: dict[tuple[str, str, str], dict[str, float]], workload: str, *, per: str) -> Table:
    """Ours, theirs and the ratio by concurrency, per second of wall or CPU time."""
    table: Table = {"ours": {}, "hf": {}, "ratio": {}}
    for (name, concurrency, system), cell in best.items():
        if name == workload:
            side = table["ours" if system.startswith(f"{OURS} ") else "hf"]
            side[concurrency] = max(side.get(concurrency, 0.0), cell[per])
    table["ratio"] = {c: round(ours / table["hf"][c], 3) for c, ours in table["ours"].items()}
    return table


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
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM instead, of the environment .venv-vllm")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, threads=arguments.threads)
        return
    if arguments.vllm:
        from bench.engine_versus_vllm import versus_vllm

        sys.stdout.write(json.dumps(versus_vllm(quick=arguments.quick, repeats=arguments.repeats)) + "\n")
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
