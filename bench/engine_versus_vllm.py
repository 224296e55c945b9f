"""``python -m bench.engine --vllm``: the embedded engine and vLLM on one CPU machine, one thread each.

vLLM lives in an environment of its own; see :func:`find_python`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engine import OURS, Job, Table, Worker, repeated, tell_progress
from bench.machine import describe_machine

VLLM = "vllm"
BARS = {"1": 1.0, "64": 0.7}
"""Least ratio (ours / vLLM, multi-turn) by concurrency."""
ROOT = Path(__file__).parents[1]
DESCRIPTION = (
    "Useful sampled tokens per second of wall time, embedded engine against vLLM on the CPU, one compute thread each: "
    "model and requests of `bench.engine` (4 layers, hidden size 256, 3.28M parameters, float32, temperature 1, "
    "logprobs of the sampled tokens). vllm: multi-turn episodes whose prompts share prefixes (`trace` there), by "
    "concurrency; vllm.equal: requests of 32 prompt + 128 sampled tokens. vLLM's engine runs without HTTP in its own "
    "process, stepped as ours is, prefix cache on (blocks of 32), eager. Both take turns at every measurement; each "
    "figure is the best of the repeats."
)


def find_python() -> str:
    """The interpreter of an environment with vLLM: $WINGBEAT_VLLM_PYTHON, or that which `make test-vllm` makes."""
    found = os.environ.get("WINGBEAT_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
    if not Path(found).exists():
        raise SystemExit(
            f"expected an environment with vLLM at {found}, got none: `make .venv-vllm/.installed` makes it, or name"
            " the Python of another one in WINGBEAT_VLLM_PYTHON"
        )
    return found


def jobs(*, quick: bool, repeats: int) -> list[Job]:
    """What both serve, in order."""
    plan = [("trace", 1, 1, 3), ("trace", 16, 24, 1), ("trace", 64, 96, 1)]
    plan += [("equal", 1, 1, 3), ("equal", 16, 16, 2), ("equal", 64, 64, 2)]
    if quick:
        plan = [("trace", 1, 1, 1), ("trace", 16, 16, 1), ("trace", 64, 64, 1)]
    return repeated(plan, repeats=repeats)


def versus_vllm(*, quick: bool, repeats: int) -> dict[str, Any]:
    """The JSON object."""
    python, started = find_python(), time.perf_counter()
    best: dict[tuple[str, str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write = "import sys; from bench.systems import build_model; build_model().save_pretrained(sys.argv[1])"
        subprocess.run([sys.executable, "-c", write, folder], cwd=ROOT, check=True, stdout=sys.stderr)
        workers = [
            stack.enter_context(Worker(OURS, threads=1)),
            stack.enter_context(
                Worker(
                    VLLM,
                    threads=1,
                    command=[python, "-m", "bench.engine_vllm", folder],
                    environment={
                        "PYTHONPATH": str(ROOT),
                        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                        "VLLM_NO_USAGE_STATS": "1",
                        "TORCH_COMPILE_DISABLE": "1",
                        "HF_HUB_OFFLINE": "1",
                    },
                )
            ),
        ]
        for job in jobs(quick=quick, repeats=1 if quick else repeats):
            for worker in workers:
                result = worker.measure(job)
                tell_progress(job, worker, result)
                cell = (job.workload, str(job.concurrency), worker.system)
                best[cell] = max(best.get(cell, 0.0), round(result.tokens / result.wall_s, 1))
    compared: dict[str, Any] = {**_table(best, "trace")}
    if not quick:
        compared["equal"] = _table(best, "equal")
    ratios = compared["ratio"]
    return {
        "description": DESCRIPTION,
        "vllm": compared,
        "bars": {f"vllm ratio >= {bar} at {at}": ratios[at] >= bar for at, bar in BARS.items()},
        "quick": quick,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "machine": describe_machine(),
    }


def _table(best: dict[tuple[str, str, str], float], workload: str) -> Table:
    table: Table = {"ours": {}, "vllm": {}, "ratio": {}}
    for (name, concurrency, system), rate in best.items():
        if name == workload:
            table["ours" if system == OURS else "vllm"][concurrency] = rate
    table["ratio"] = {at: round(ours / table["vllm"][at], 3) for at, ours in table["ours"].items()}
    return table
