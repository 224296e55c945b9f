"""What every worker of the engine benchmark does with its jobs; needs nothing but the standard library."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from bench.workloads import Episode, equal_workload, trace_workload, useful_tokens

MAKERS = {"equal": equal_workload, "trace": trace_workload}


def serve_jobs(serve: Callable[[list[Episode], int], None], *, out: TextIO) -> None:
    """A worker's life: a line when ready, then one JSON job per input line, one JSON result per output line."""
    serve([Episode("warm-up", list(range(8)), (8,), ())], 1)
    _say(out, {})
    for line in sys.stdin:
        job = json.loads(line)
        episodes = MAKERS[job["workload"]](job["episodes"], seed=job["seed"])
        tokens = useful_tokens(episodes)
        wall, cpu = time.perf_counter(), time.process_time()
        serve(episodes, job["concurrency"])
        _say(out, {"tokens": tokens, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
