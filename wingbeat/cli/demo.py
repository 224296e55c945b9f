"""``wingbeat demo``: the whole system on this machine, teaching a small agent by reinforcement."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from wingbeat.cli.plots import plot_run
from wingbeat.cli.program import program
from wingbeat.cli.progress import RunProgress, draw_curve
from wingbeat.cli.run import INTERRUPTED
from wingbeat.core.config import Config
from wingbeat.core.errors import SetupError
from wingbeat.dataflow.evaluation import EvaluationResult
from wingbeat.deploy.training import TrainingPlan, TrainingResult, run_plan
from wingbeat.environments.calculator import DEMO_PRESET, best_constant, make_split

CONTEXT_TOKENS = 128
CONTROLS = ("none", "lr0", "shuffled-advantages", "true-advantages")
"""``shuffled-advantages`` and ``true-advantages`` are a pair: the same run but for whose advantage an episode gets."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo measured; ``as_dict`` is its machine-readable form."""

    result: TrainingResult
    before: EvaluationResult
    after: EvaluationResult
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        keys = ("train_steps", "episodes", "sampled_tokens", "staleness_max", "overlap_frac", "discard_rate")
        return {
            "eval_before": _round(self.before.mean),
            "eval_after": _round(self.after.mean),
            "wall_s": round(self.wall_s, 2),
            **{key: self.result.summary[key] for key in keys},
            "run_dir": str(self.result.run_dir),
        }


def demo_config(*, seed: int, control: str, directory: Path) -> Config:
    """The tuned configuration, or a negative control of it (the same but for what teaches)."""
    if control not in CONTROLS:
        raise SetupError(f"unknown control {control!r}; one of {', '.join(CONTROLS)}")
    preset = DEMO_PRESET
    trainer: dict[str, Any] = {
        "algorithm": preset.algorithm,
        "learning_rate": _learning_rate(control),
        "schedule": preset.schedule,
        "warmup_steps": preset.warmup_steps,
        "min_lr_ratio": preset.min_lr_ratio,
        "betas": preset.betas,
        "weight_decay": preset.weight_decay,
        "max_grad_norm": preset.max_grad_norm,
        "updates_per_batch": preset.updates_per_batch,
        "checkpoint_every": 25,
        "threads": 1,  # so small a model only loses by more, and every machine runs what was measured
        "control": "shuffled_advantages" if control == "shuffled-advantages" else "none",
    }
    return Config.model_validate(
        {
            "run": {"name": "demo", "dir": str(directory), "seed": seed, "steps": preset.steps},
            "server": {"port": 0},
            "policies": {
                "solver": {
                    "model": "builtin:calculator",
                    "context_tokens": CONTEXT_TOKENS,
                    "sampling": {"temperature": preset.temperature},
                    "trainer": trainer,
                }
            },
            "engine": {"max_running": 128, "kv_tokens": 32768, "threads": 1},
            "dataflow": {
                "group_size": preset.group_size,
                "groups_per_step": preset.groups_per_step,
                "max_staleness": preset.max_staleness,
            },
            "tasks": {"environment": "calculator", "options": {"seed": seed}},
            "eval": {"samples_per_task": preset.eval_samples if control == "none" else preset.control_eval_samples},
            "agent": {"path": str(agent_file()), "processes": 2, "concurrency": 48},
        }
    )


def _learning_rate(control: str) -> float:
    match control:
        case "lr0":
            return 0.0
        case "shuffled-advantages" | "true-advantages":
            return DEMO_PRESET.control_learning_rate
        case _:
            return DEMO_PRESET.learning_rate


def agent_file() -> Path:
    """The shipped agent."""
    return Path(__file__).parents[1] / "environments" / "calculator" / "agent.py"


def run_demo(*, seed: int, control: str, json_output: bool, directory: Path) -> None:
    """Run it and show it.  Raises SetupError where the installation lacks something."""
    started = time.monotonic()
    console = Console(stderr=True)
    config = demo_config(seed=seed, control=control, directory=directory)
    console.print(Panel.fit(_introduction(config, control), title="wingbeat demo", border_style="cyan"))
    with RunProgress(console, title="teaching the agent") as progress:
        plan = TrainingPlan(
            config,
            config_dir=Path.cwd(),
            on_ready=lambda supervisor: progress.begin(config.run.steps),
            on_event=progress.on_event,
            on_note=progress.tell,
        )
        result = run_plan(plan)
    if not result.complete:
        left = f"; what it did so far is in {result.run_dir}" if result.run_dir.exists() else " before it began"
        typer.echo(f"the demo was interrupted{left}", err=True)
        raise typer.Exit(INTERRUPTED)
    before, after = result.evaluation("before"), result.evaluation("after")
    if before is None or after is None:
        raise SetupError(f"the demo could not be evaluated; see {result.run_dir}/logs")
    report = DemoReport(result, before, after, time.monotonic() - started)
    plot = result.run_dir / "reward.png"
    plot_run(result.run_dir, plot, title=f"wingbeat demo, seed {seed}")
    _show(console, report, seed=seed, rewards=progress.rewards, plot=plot)
    if json_output:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")


def _introduction(config: Config, control: str) -> str:
    lines = [
        "A server, an engine, a trainer and two agent processes start on this machine.",
        "The agent (openai SDK) must call a calculator and report its result; reward 1 if exact.",
        f"Group-relative policy gradients: {config.dataflow.groups_per_step} tasks x"
        f" {config.dataflow.group_size} episodes per step, {config.run.steps} steps.",
    ]
    if control == "true-advantages":
        lines.append("The counterpart of shuffled-advantages: its low learning rate, but true advantages.")
    elif control != "none":
        lines.append(f"Negative control {control}: nothing should be learnt.")
    return "\n".join(lines)


def _show(console: Console, report: DemoReport, *, seed: int, rewards: list[float], plot: Path) -> None:
    for line in draw_curve(rewards):
        console.print(line, style="green", highlight=False)
    answer, constant = best_constant(make_split(seed)[1])
    table = Table(title=f"held-out tasks ({len(report.before.rewards)}, never trained on)")
    for column in ("", "reward", "standard error"):
        table.add_column(column, justify="left" if not column else "right")
    for name, evaluation in (("before", report.before), ("after", report.after)):
        table.add_row(name, f"{evaluation.mean:.3f}", f"{evaluation.stderr or 0:.3f}")
    table.add_row(f"best constant answer ({answer!r})", f"{constant:.3f}", "")
    console.print(table)
    numbers = report.as_dict()
    console.print(
        f"{numbers['wall_s']:.0f} s, {numbers['train_steps']} steps, {numbers['episodes']} episodes,"
        f" {numbers['sampled_tokens']} sampled tokens, staleness at most {numbers['staleness_max']},"
        f" {numbers['overlap_frac']:.0%} of training ran beside rollouts; curve: {plot}",
        highlight=False,
    )
    console.print("Next:", style="bold")
    name = program()
    for command in (
        f"{name} inspect {report.result.run_dir}",
        f"{name} init my-agent && cd my-agent && {name} train config.toml",
        f"{name} serve config.toml    # then: wingbeat rollout agent.py --server URL, from any machine",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
