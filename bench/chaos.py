"""A training run under faults, and whether anything was lost: ``python -m bench.chaos [--minutes 5] [--seed 0]``.

Everything is real: the supervisor, control, a trainer, two engines and eight ``wingbeat rollout`` as processes.  A
seeded plan (bench/chaos_plan.py) kills and stops them, disturbs their connections, fills the disk and moves control's
clocks.  The last line of output is one JSON object; the exit code is 1 where a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.chaos_audit import Ack, Audit, audit, read_acks
from bench.chaos_faults import middle, recoveries_s
from bench.chaos_plan import Kind, count_kills, count_kinds, make_plan
from bench.chaos_run import ChaosRun, Stage, perform
from bench.chaos_work import DESCRIPTION as WORK
from bench.chaos_work import SOURCES, make_tasks
from bench.machine import describe_machine
from wingbeat.dataflow.audit import audit_run

CALM_SHARE = 0.2
REST_S = 20.0
"""Of the whole time, what starting, the last recovery and the end take."""
FULL_MINUTES = 4.0
"""From here on a run has every kind of fault often enough to be judged by all bars."""
FAULTS_BAR, KIND_BAR, KILLS_BAR, ROLE_BAR = 60, 3, 20, 3
KEPT = ("events.jsonl", "ledger.sqlite", "metrics.jsonl")
ROLES = ("control", "trainer", "engine")
RECOVERY_BAR_S, THROUGHPUT_BAR, THROUGHPUT_GOAL = 20.0, 0.5, 0.7
DESCRIPTION = (
    "{work}. {calm:.0f} s of calm, then {faults:.0f} s with faults. episodes_finished: finishes that some client saw"
    " acknowledged and wrote down afterwards. acknowledged_lost: of these, what the ledger does not count or keeps"
    " nothing of for training. trained_twice: episodes in more than one step of the surviving lineage. tasks_skipped:"
    " tasks that the seed's order deals and no group was opened on, and groups dropped without training."
    " orphan_processes: processes that carry the run's mark after its end. leaked_leases: leases and attempts that the"
    " server holds after all clients have left and its clock has gone on by ten minutes. recovery: from each fault's"
    " end to the next trained step, whatever else goes wrong meanwhile. throughput_vs_calm: acknowledged finishes per"
    " second with faults over those in the calm part. full_disk: a file system of its own ({disk})."
)


def report(
    run: ChaosRun, found: Audit, acks: Sequence[Ack], *, problems: Sequence[str], is_full: bool
) -> dict[str, Any]:
    """All keys but those of the machine."""
    faults = [applied.fault for applied in run.applied]
    kinds, kills = count_kinds(faults), count_kills(faults)
    recoveries = recoveries_s(run.applied, run.steps_s)
    calm, chaos = (rate_of(acks, *window) for window in (run.calm, run.chaos))
    summary: dict[str, Any] = {
        "faults": kinds,
        "sigkill_by_role": kills,
        "episodes_finished": found.acknowledged,
        "acknowledged_lost": found.acknowledged_lost,
        "trained_twice": found.trained_twice,
        "tasks_skipped": found.tasks_skipped,
        "orphan_processes": len(run.orphans),
        "leaked_leases": run.leaked_leases,
        "recovery_p50_s": finite(middle(recoveries)),
        "recovery_max_s": finite(max(recoveries, default=math.inf)),
        "throughput_vs_calm": round(chaos / calm, 3) if calm else 0.0,
        "calm_episodes_per_s": round(calm, 2),
        "steps": len(run.steps_s),
        "inexact_replays": run.inexact_replays,
        "ledger_problems": list(problems),
        "recovery_by_fault_s": [
            [a.fault.kind, a.fault.target, finite(seconds)] for a, seconds in zip(run.applied, recoveries, strict=True)
        ],
        "server_starts": run.server_starts,
        "events": dict(sorted(run.events.items())),
        "processes_given_up": run.given_up,
        "server_exit_code": run.exit_code,
        "details": [*found.details, *(" ".join(words) for words in run.orphans.values())],
    }
    summary["goals"] = {f"throughput_vs_calm >= {THROUGHPUT_GOAL}": summary["throughput_vs_calm"] >= THROUGHPUT_GOAL}
    summary["bars"] = bars(summary, is_full=is_full)
    return summary


def bars(summary: dict[str, Any], *, is_full: bool) -> dict[str, bool]:
    """What must hold; a short run is judged by what may never happen, not by how much or how fast."""
    zeros = ("acknowledged_lost", "trained_twice", "tasks_skipped", "orphan_processes", "leaked_leases")
    found = {f"{key} = 0": summary[key] == 0 for key in (*zeros, "inexact_replays")}
    found["the ledger's own audit finds nothing"] = not summary["ledger_problems"]
    found["the server ended cleanly"] = summary["server_exit_code"] == 0 and not summary["processes_given_up"]
    found["each kind of fault happened"] = min(summary["faults"].values()) > 0
    if not is_full:
        return found
    kinds, kills, slowest_s = summary["faults"], summary["sigkill_by_role"], summary["recovery_max_s"]
    return found | {
        f"faults >= {FAULTS_BAR}, of each kind >= {KIND_BAR}": sum(kinds.values()) >= FAULTS_BAR
        and min(kinds.values()) >= KIND_BAR,
        f"sigkill >= {KILLS_BAR}, of {', '.join(ROLES)} >= {ROLE_BAR} each": kinds[Kind.SIGKILL] >= KILLS_BAR
        and min(kills[role] for role in ROLES) >= ROLE_BAR,
        f"recovery_max_s <= {RECOVERY_BAR_S:.0f}": slowest_s is not None and slowest_s <= RECOVERY_BAR_S,
        f"throughput_vs_calm >= {THROUGHPUT_BAR}": summary["throughput_vs_calm"] >= THROUGHPUT_BAR,
    }


def rate_of(acks: Sequence[Ack], begin_s: float, end_s: float) -> float:
    """Acknowledged finishes per second."""
    return sum(begin_s <= ack.at_s < end_s for ack in acks) / max(end_s - begin_s, 1e-9)


def finite(seconds: float) -> float | None:
    """JSON has no infinity: None where nothing came."""
    return round(seconds, 2) if math.isfinite(seconds) else None


def measure(minutes: float, *, seed: int, folder: Path) -> dict[str, Any]:
    """One run and its report."""
    calm_s = 60.0 * minutes * CALM_SHARE
    faults_s = max(10.0, 60.0 * minutes - calm_s - REST_S)
    stage = Stage(folder, seed=seed)
    judged: dict[str, Any] = {}

    def judge(run_dir: Path) -> None:
        acks = read_acks(stage.acks)
        tasks = {source: make_tasks(source, seed=seed) for source in SOURCES}
        judged["acks"] = acks
        judged["found"] = audit(run_dir / "ledger.sqlite", acks, tasks=tasks, seed=seed)
        judged["problems"] = audit_run(run_dir)
        for name in KEPT:
            shutil.copy(run_dir / name, folder)
        shutil.copytree(run_dir / "logs", folder / "logs", dirs_exist_ok=True)

    run = asyncio.run(perform(stage, make_plan(seed, faults_s=faults_s), calm_s=calm_s, keep=judge))
    summary = report(run, judged["found"], judged["acks"], problems=judged["problems"], is_full=minutes >= FULL_MINUTES)
    return {"description": DESCRIPTION.format(work=WORK, calm=calm_s, faults=faults_s, disk=run.disk), **summary}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="length of the whole run")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults, the tasks and the training")
    parser.add_argument("--quick", action="store_true", help="one minute: fewer faults, judged by the zeros alone")
    parser.add_argument("--keep", type=Path, default=None, help="a new folder in which ledger and logs are kept")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    minutes = 1.0 if arguments.quick else arguments.minutes
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wingbeat-chaos-") as folder:
        kept = Path(folder)
        if arguments.keep is not None:
            kept = arguments.keep
            kept.mkdir(parents=True)
        summary = measure(minutes, seed=arguments.seed, folder=kept)
    summary |= {
        "seed": arguments.seed,
        "minutes": minutes,
        "elapsed_s": round(time.monotonic() - started, 1),
        "machine": describe_machine(),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.exit(0 if all(summary["bars"].values()) else 1)


if __name__ == "__main__":
    main()
