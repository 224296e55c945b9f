"""Two policies under three ways to schedule the same work: ``python -m bench.multipolicy [--quick]``.

    sync      lockstep, the usual design: a batch is generated, all policies train on it, and so on
    barrier   asynchronous, but no policy starts a step before all have finished theirs
    ours      asynchronous, each policy by its own clock

All is real (``wingbeat train``: control with its gateway, the engine, two trainers, an agent over HTTP) but the
tools, which sleep.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.machine import describe_machine
from bench.team_report import (
    Bound,
    by_mode,
    final_reward,
    idle_share,
    mean_cpu,
    paired,
    reward_of,
    trainer_name,
    work_bound,
)
from bench.team_runs import MODES, TeamRun, run_team
from bench.team_work import MIXTURE, POLICIES, Work
from wingbeat.deploy.devices import usable_cores

SPEEDUP_BAR, BOUND_BAR, DISCARD_BAR, IDLE_BAR = 2.7, 0.85, 0.01, 0.15
QUICK = Work(steps=4, groups_per_step=4, time_scale=1 / 200, hidden=64, layers=2, eval_tasks=4, eval_samples=1)
DESCRIPTION = (
    "Wall seconds from all workers being up to the last step of both policies: {work}. Tool latencies: {mixture}, "
    "log-uniform in between, times {scale:.4g}, drawn by (seed, task, member, turn), so all modes meet the same. sync: "
    "max_staleness 0 with a barrier. barrier and ours: max_staleness {staleness}, with and without. final_reward: "
    "held-out, mean over tasks and policies. *_difference: ours minus the other, over paired seeds with Student's 95% "
    "interval. vs_bound: least time that any schedule could take / ours (bench/team_report.py derives it); "
    "vs_bound_compute leaves the CPU time of control and of the agent out of it. "
    "trainer_idle_share: of the time from a trainer's first step to the end of its last, what it spends outside of "
    "steps; the worse of both. tool_to_compute: seconds of the tools' longest path of a group / CPU seconds of one "
    "step of one trainer."
)


def describe(work: Work) -> str:
    buckets = (f"{share:.0%} of {low:g} to {high:g} s" for share, low, high in MIXTURE)
    return DESCRIPTION.format(
        work=work.describe(), mixture=", ".join(buckets), scale=work.time_scale, staleness=work.max_staleness
    )


def measure(work: Work, *, seeds: Sequence[int]) -> list[TeamRun]:
    """All modes of every seed; modes take turns, so that a slow hour is unfair to none."""
    runs: list[TeamRun] = []
    for seed in seeds:
        for mode in MODES:
            with tempfile.TemporaryDirectory(prefix="wingbeat-team-") as folder:
                run = run_team(work, mode=mode, seed=seed, folder=Path(folder))
            idle = {policy: round(idle_share(steps), 3) for policy, steps in run.steps.items()}
            sys.stderr.write(
                f"{mode}, seed {seed}: {run.wall_s:.1f} s, reward {final_reward(run):.3f}, idle {idle}, "
                f"CPU { ({name: round(used, 1) for name, used in run.cpu_s.items()}) }\n"
            )
            runs.append(run)
    return runs


def report(runs: Sequence[TeamRun], work: Work, *, cores: int) -> dict[str, Any]:
    """All keys but those of the machine."""
    modes = by_mode(runs)
    ours = modes["ours"]
    wall_s = {mode: fmean(run.wall_s for run in found) for mode, found in modes.items()}
    rewards = {mode: [final_reward(run) for run in found] for mode, found in modes.items()}
    bounds = [work_bound([run for run in runs if run.seed == own.seed], work, cores=cores) for own in ours]
    differences = {mode: paired(rewards["ours"], rewards[mode]) for mode in ("sync", "barrier")}
    idle = {policy: fmean(idle_share(run.steps[policy]) for run in ours) for policy in POLICIES}
    summary: dict[str, Any] = {
        "description": describe(work),
        "wall_s": {mode: round(seconds, 2) for mode, seconds in wall_s.items()},
        "wall_s_by_seed": {mode: [round(run.wall_s, 2) for run in found] for mode, found in modes.items()},
        "speedup_over_sync": round(wall_s["sync"] / wall_s["ours"], 3),
        "speedup_over_barrier": round(wall_s["barrier"] / wall_s["ours"], 3),
        "final_reward": {mode: round(fmean(found), 4) for mode, found in rewards.items()},
        "final_reward_by_policy": {
            mode: {policy: round(fmean(reward_of(run, policy) for run in found), 4) for policy in POLICIES}
            for mode, found in modes.items()
        },
        "final_reward_difference": {f"ours_minus_{mode}": asdict(found) for mode, found in differences.items()},
        "first_reward": {mode: round(fmean(_first_reward(run) for run in found), 4) for mode, found in modes.items()},
        "staleness_max": {mode: max(run.staleness_max for run in found) for mode, found in modes.items()},
        "discard_rate": max(run.discard_rate for run in ours),
        "vs_bound": round(sum(bound.seconds for bound in bounds) / sum(run.wall_s for run in ours), 3),
        "vs_bound_compute": round(sum(bound.compute for bound in bounds) / sum(run.wall_s for run in ours), 3),
        "bound_s": _mean_bound(bounds),
        "trainer_idle_share": round(max(idle.values()), 3),
        "trainer_idle_share_by_policy": {policy: round(share, 3) for policy, share in idle.items()},
        "tool_to_compute": round(_tool_to_compute(runs, work), 2),
        "cpu_s": {mode: mean_cpu(found) for mode, found in modes.items()},
        "step_s": {mode: round(_step_s(found), 3) for mode, found in modes.items()},
        "episodes": {mode: fmean(run.episodes for run in found) for mode, found in modes.items()},
        "sampled_tokens": {mode: fmean(run.sampled_tokens for run in found) for mode, found in modes.items()},
        "forward_tokens": {mode: fmean(run.forward_tokens for run in found) for mode, found in modes.items()},
        "work": asdict(work),
        "seeds": [run.seed for run in ours],
    }
    summary["bars"] = {
        f"speedup_over_sync >= {SPEEDUP_BAR}": summary["speedup_over_sync"] >= SPEEDUP_BAR,
        f"vs_bound >= {BOUND_BAR}": summary["vs_bound"] >= BOUND_BAR,
        "final rewards equal within the interval": all(found.holds(0.0) for found in differences.values()),
        f"discard_rate < {DISCARD_BAR}": summary["discard_rate"] < DISCARD_BAR,
        f"trainer_idle_share <= {IDLE_BAR}": summary["trainer_idle_share"] <= IDLE_BAR,
    }
    return summary


def _first_reward(run: TeamRun) -> float:
    return fmean(curve[0] for curve in run.curves.values())


def _mean_bound(bounds: Sequence[Bound]) -> dict[str, float]:
    return {
        "cores": round(fmean(bound.cores for bound in bounds), 2),
        "trainer": round(fmean(bound.trainer for bound in bounds), 2),
        "tail": round(fmean(bound.tail for bound in bounds), 2),
        "compute": round(fmean(bound.compute for bound in bounds), 2),
    }


def _step_s(runs: Sequence[TeamRun]) -> float:
    """Wall seconds of a step, mean over all."""
    return fmean(step.train_s for run in runs for steps in run.steps.values() for step in steps)


def _tool_to_compute(runs: Sequence[TeamRun], work: Work) -> float:
    """From the synchronous runs, whose trainers have the cores to themselves."""
    lockstep = [run for run in runs if run.mode == "sync"]
    path_s = fmean(path for run in lockstep for path in run.group_paths_s)
    return path_s / fmean(run.cpu_s[trainer_name(policy)] / work.steps for run in lockstep for policy in POLICIES)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.multipolicy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny models, 4 steps, one seed")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    arguments = parser.parse_args()
    started = time.perf_counter()
    work = QUICK if arguments.quick else Work()
    runs = measure(work, seeds=range(1 if arguments.quick else arguments.seeds))
    summary = {
        **report(runs, work, cores=usable_cores()),
        "quick": arguments.quick,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "machine": describe_machine(),
    }
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
