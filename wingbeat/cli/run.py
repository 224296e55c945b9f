"""``wingbeat serve`` and ``wingbeat train``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from wingbeat.cli.doctor import require_server
from wingbeat.core.config import Config, dump_toml, load_config
from wingbeat.core.errors import ConfigError

if TYPE_CHECKING:
    from wingbeat.deploy.local import Supervisor
    from wingbeat.deploy.training import TrainingResult

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [--SECTION.KEY=VALUE]...",
        help="A configuration file and settings that override it, such as --run.steps=20.",
    ),
]
ResumeOption = Annotated[
    Path | None, typer.Option(help="Continue the run of this directory (its config.toml serves where none is given).")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and end.")]


def serve(arguments: ConfigArguments = None, resume: ResumeOption = None, dry_run: DryRunOption = False) -> None:
    """Host policies: generation and training for agents that run elsewhere (`wingbeat rollout`)."""
    config, config_dir = read_config(arguments or [], resume)
    if dry_run:
        typer.echo(dump_toml(config), nl=False)
        return
    require_server()
    from wingbeat.deploy.local import run_server

    run_server(config, config_dir, resume=resume, on_ready=_announce)


def train(
    arguments: ConfigArguments = None,
    resume: ResumeOption = None,
    dry_run: DryRunOption = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train: a server, the configured tasks and the configured agent, until the run is complete."""
    config, config_dir = read_config(arguments or [], resume)
    if dry_run:
        typer.echo(dump_toml(config), nl=False)
        return
    require_server()
    from wingbeat.cli.progress import RunProgress
    from wingbeat.deploy.training import TrainingPlan, run_plan

    with RunProgress(Console(stderr=True), title=f"training {config.run.name}") as progress:

        def begin(supervisor: Supervisor) -> None:
            progress.begin(config.run.steps)

        plan = TrainingPlan(config, config_dir, resume=resume, on_ready=begin, on_event=progress.on_event)
        result = run_plan(plan)
    typer.echo(json.dumps(result_data(result))) if json_output else _show(result)
    if not result.complete:
        typer.echo(f"interrupted; continue with --resume {result.run_dir}", err=True)
        raise typer.Exit(INTERRUPTED)


def read_config(arguments: Sequence[str], resume: Path | None) -> tuple[Config, Path]:
    """The configuration of the command line and the folder that its relative paths start at.

    Raises ConfigError for more than one file, for what is neither a file nor an override, and where there
    is no run to continue.
    """
    if resume is not None and not (resume / "config.toml").is_file():
        raise ConfigError(f"--resume {resume}: expected a run directory, with its config.toml; got none")
    overrides = [argument for argument in arguments if argument.startswith("-")]
    files = [Path(argument) for argument in arguments if not argument.startswith("-")]
    if len(files) > 1:
        shown = ", ".join(map(str, files))
        raise ConfigError(f"expected one configuration file, got {shown}; overrides look like --section.key=value")
    if files:
        return load_config(files[0], overrides), files[0].absolute().parent
    return load_config(None if resume is None else resume / "config.toml", overrides), Path.cwd()


def result_data(result: TrainingResult) -> dict[str, Any]:
    """A training result as JSON data."""
    evaluations = [
        {"name": done.spec.name, "version": done.spec.version, "mean": done.mean, "stderr": done.stderr}
        for done in result.evaluations
    ]
    return {
        "run_dir": str(result.run_dir),
        "complete": result.complete,
        "wall_s": round(result.wall_s, 2),
        **result.summary,
        "evaluations": evaluations,
    }


def _show(result: TrainingResult) -> None:
    """The evaluations, and where everything lies (unwrapped, so that it can be copied)."""
    console = Console()
    if result.evaluations:
        console.print(_result_table(result))
    lines = [f"run directory: {result.run_dir}", f"look inside:   wingbeat inspect {result.run_dir}"]
    if result.complete:
        lines.append(f"trained model: {result.run_dir / 'export'}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _result_table(result: TrainingResult) -> Table:
    table = Table(title=f"held-out reward ({result.wall_s:.0f} s in all)")
    for column in ("evaluation", "version", "reward", "standard error"):
        table.add_column(column, justify="left" if column == "evaluation" else "right")
    for done in result.evaluations:
        mean = "none" if done.mean is None else f"{done.mean:.3f}"
        stderr = "none" if done.stderr is None else f"{done.stderr:.3f}"
        table.add_row(done.spec.name, str(done.spec.version), mean, stderr)
    difference = result.difference
    if difference is not None:
        table.caption = (
            f"difference {difference.mean:+.3f}, 95% interval {difference.low:+.3f} to {difference.high:+.3f}"
            f" (paired over {difference.num_tasks} held-out tasks)"
        )
    return table


def _announce(supervisor: Supervisor) -> None:
    console = Console()
    console.print(f"serving at [bold]{supervisor.url}[/bold], run directory {supervisor.run_dir}", soft_wrap=True)
    console.print(f"run agents from any machine: wingbeat rollout agent.py --server {supervisor.url}", soft_wrap=True)
