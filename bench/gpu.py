"""What one accelerator does with Wingbeat, in at most ten minutes: ``bash bench/gpu.sh [--tiny]``.

Every part is a process of its own with a time limit of its own, and after each the report so far is printed as one line
of JSON: whatever ends this program, what was measured before is on the screen.  The last line is the whole report.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOTAL_S = 580.0
REQUIRED = (
    *("torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2"),
    *("msgspec", "pydantic", "peft", "llguidance", "zstandard"),
)
"""What engine, trainer and weights import; the first line comes with transformers."""
SERVER = (
    *("fastapi", "uvicorn", "aiohttp", "orjson", "prometheus_client", "openai", "httptools", "websockets"),
    *("uvloop", "docstring_parser", "jsonschema", "matplotlib", "rich", "typer", "gguf"),
)
"""What the demo needs besides."""
SHAPES = ("qwen3-0.6b", "qwen3-1.7b")
TINY = "tiny"
PARTS = {"build": 60.0, "engine": 60.0, "trainer": 90.0, "tree": 120.0, "step": 120.0}
"""Of each model, with the seconds each may take."""
DEMO_S, DEMO_KEPT_S = 180.0, 130.0
"""What the demo may take, and what the parts before it leave for it: its processes begin with compiling, too."""
ROOT = Path(__file__).parents[1]
DESCRIPTION = (
    "Models of the shapes of Qwen3 0.6B and 1.7B with random weights, bfloat16, one device. engine: random prompts, "
    "all requests at once, temperature 1; sampled tokens per second of wall time. trainer: full fine-tuning on rows "
    "that share nothing; tokens of all kinds per second, peak_gib the most that the device held. tree: a group of "
    "replies to one prompt, as prefix tree and as packed rows: seconds of a step, growth of the device's memory within "
    "one, and how far the gradients of the first layer are apart. step: one round of reinforcement learning: the "
    "engine samples, the trainer steps, the weights are copied to the host as for publishing (stage_s, the first and "
    "the second time), their delta is encoded and decoded on the device (decode_s without its checksum_s, which the "
    "CPU computes) and swapped into the engine; max_abs_logprob_diff and mismatch_kl are between engine and trainer, "
    "over the sampled tokens. warnings: what Wingbeat logged, such as how trees attend where FlexAttention does not "
    "compile. mfu: model FLOPs (6 per weight and trained token, 2 per weight and token of the engine, attention added) "
    "over the device's dense bfloat16 peak, left out where that is not known. The first round of everything is not "
    "measured."
)


@dataclass(frozen=True, slots=True)
class Part:
    """One process to run."""

    name: str
    shape: str
    command: Sequence[str]
    limit_s: float
    kept_s: float = 0.0
    """Of all the time, what the parts before it leave for this one."""


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def has_accelerator() -> bool:
    import torch  # after it is known to be there

    return torch.accelerator.is_available()


def plan(folder: Path, *, tiny: bool) -> list[Part]:
    """All parts in order."""
    module = [sys.executable, "-m", "bench.gpu_parts"]
    parts = [
        Part(name, shape, [*module, name, "--shape", shape, "--folder", str(folder)], limit_s)
        for shape in ((TINY,) if tiny else SHAPES)
        for name, limit_s in PARTS.items()
    ]
    if not tiny and not missing(SERVER):
        command = [sys.executable, "-m", "wingbeat.cli", "demo", "--json", "--dir", str(folder / "demo")]
        parts.append(Part("demo", "", command, DEMO_S, kept_s=DEMO_KEPT_S))
    return parts


def environment() -> dict[str, str]:
    """Of a part: it finds Wingbeat here, also where that is not installed, and asks no hub for anything."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def run_part(part: Part, *, limit_s: float) -> dict[str, Any]:
    """The part's figures, or what went wrong under ``error``."""
    started = time.monotonic()
    with subprocess.Popen(
        part.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {limit_s:g} s"}
        finally:
            _end(process)
    lines = output.splitlines()
    if process.returncode or not lines:
        return {"error": f"exit code {process.returncode}: {errors.strip()[-500:] or 'it said nothing'}"}
    try:
        found = dict(json.loads(lines[-1]))
    except (ValueError, TypeError):  # what was measured before and comes after is not lost with it
        return {"error": f"its last line is no JSON object: {lines[-1][:200]}"}
    return {**found, "wall_s": round(time.monotonic() - started, 1)}


def _end(process: subprocess.Popen[str]) -> None:
    """Nothing of a part outlives it: it leads a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(*, tiny: bool, total_s: float) -> dict[str, Any]:
    started = time.monotonic()
    report: dict[str, Any] = {"description": DESCRIPTION, "dry_run": tiny}
    lacking = missing(REQUIRED)
    if lacking:
        return {**report, "error": f"not measured, missing: {', '.join(lacking)} (pip install {' '.join(lacking)})"}
    if not tiny and not has_accelerator():
        return {**report, "error": "not measured: torch finds no accelerator; --tiny makes a dry run without"}
    if tiny:
        report["demo"] = "not measured: a dry run"
    elif without := missing(SERVER):
        report["demo"] = f"not measured, missing: {', '.join(without)} (pip install 'wingbeat[server]')"
    with tempfile.TemporaryDirectory(prefix="wingbeat-gpu-") as folder:
        parts = plan(Path(folder), tiny=tiny)
        for number, part in enumerate(parts):
            kept_s = sum(later.kept_s for later in parts[number + 1 :])
            left_s = total_s - kept_s - (time.monotonic() - started)
            sys.stderr.write(f"{part.shape or 'demo'} {part.name}, {left_s:.0f} s left\n")
            too_late = {"error": f"not measured: {total_s - kept_s:.0f} s were over"}
            found = run_part(part, limit_s=min(part.limit_s, left_s)) if left_s > 5 else too_late
            if part.shape:
                report.setdefault(part.shape, {})[part.name] = found
            else:
                report[part.name] = found
            report["elapsed_s"] = round(time.monotonic() - started, 1)
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="bash bench/gpu.sh", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a dry run with a tiny model, also on a CPU")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="seconds for everything")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds: the part ends, too
    report = run(tiny=arguments.tiny, total_s=arguments.total_s)
    sys.stdout.write(json.dumps(report) + "\n")
    sys.exit(1 if "error" in report else 0)


if __name__ == "__main__":
    main()
