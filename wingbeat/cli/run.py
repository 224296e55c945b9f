"""``wingbeat serve`` and ``wingbeat train``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from wingbeat.cli.arguments import read_config
from wingbeat.cli.doctor import require_server
from wingbeat.cli.program import program
from wingbeat.cli.terminal import PlainConsole
from wingbeat.core.config import Config, dump_toml
from wingbeat.core.config.server import is_loopback
from wingbeat.deploy.checks import (
    EVERY_ADDRESS,
    check_agents,
    check_chains,
    check_exposure,
    check_sources,
    check_trains,
)
from wingbeat.deploy.run_keys import without_plain_keys

if TYPE_CHECKING:
    from wingbeat.deploy.local import MakePlace, Supervisor
    from wingbeat.deploy.training import TrainingResult

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [--SECTION.KEY=VALUE]...",
        help="A configuration file (else ./config.toml) and settings that override it, such as --run.steps=20.",
    ),
]
ResumeOption = Annotated[
    Path | None, typer.Option(help="Continue the run of this directory (its config.toml serves where none is given).")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and end.")]


def serve(arguments: ConfigArguments = None, resume: ResumeOption = None, dry_run: DryRunOption = False) -> None:
    """Host policies: generation and training for agents that run elsewhere (`wingbeat rollout`)."""
    config, config_dir = checked_config(arguments, resume, trains=False)
    if dry_run:
        show_config(config)
        return
    run_serve(config, config_dir, resume)


def run_serve(config: Config, config_dir: Path, resume: Path | None, place: MakePlace | None = None) -> None:
    """Serve a checked configuration until Ctrl-C; ``place`` says where its processes run, None: on this machine."""
    require_server()
    from wingbeat.deploy.local import run_server, this_machine

    console = Console(stderr=True)

    def note(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    command = "serve" if place is None else "deploy ray"
    place = place or this_machine
    run_dir = run_server(config, config_dir, resume=resume, on_ready=_announce, on_note=note, place=place)
    how = f"; continue with {program()} {command} --resume {run_dir}" if run_dir.exists() else " before it served"
    typer.echo(f"stopped{how}", err=True)


def train(
    arguments: ConfigArguments = None,
    resume: ResumeOption = None,
    dry_run: DryRunOption = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train: a server, the configured tasks and the configured agent, until the run is complete."""
    config, config_dir = checked_config(arguments, resume, trains=True)
    if dry_run:
        show_config(config)
        return
    run_train(config, config_dir, resume, json_output=json_output)


def run_train(
    config: Config, config_dir: Path, resume: Path | None, *, json_output: bool, place: MakePlace | None = None
) -> None:
    """Train a checked configuration to its end; ``place`` as of :func:`run_serve`."""
    require_server()
    from wingbeat.cli.progress import RunProgress
    from wingbeat.deploy.local import this_machine
    from wingbeat.deploy.training import TrainingPlan, run_plan

    with RunProgress(PlainConsole(stderr=True), title=f"training {config.run.name}") as progress:

        def begin(supervisor: Supervisor) -> None:
            progress.begin(config.run.steps, log=supervisor.run_dir / "logs" / "control.log")

        plan = TrainingPlan(
            config,
            config_dir,
            resume=resume,
            on_ready=begin,
            on_event=progress.on_event,
            on_note=progress.tell,
            place=place or this_machine,
        )
        result = run_plan(plan)
    if not result.complete and not result.run_dir.exists():
        typer.echo("interrupted before the run began; nothing is left of it", err=True)
        raise typer.Exit(INTERRUPTED)
    if json_output:
        typer.echo(json.dumps({**result_data(result), "warnings": progress.warnings}))
    else:
        _show(result, config, progress.warnings)
    if not result.complete:
        typer.echo(f"interrupted; continue with --resume {result.run_dir}", err=True)
        raise typer.Exit(INTERRUPTED)


def show_config(config: Config) -> None:
    """What is printed may end up in a log."""
    typer.echo(dump_toml(without_plain_keys(config)), nl=False)


def checked_config(arguments: list[str] | None, resume: Path | None, *, trains: bool) -> tuple[Config, Path]:
    """The configuration and its folder; what is refused here is refused in a dry run, too."""
    config, config_dir = read_config(arguments or [], resume)
    if trains:
        check_trains(config)
    check_exposure(config, config_dir, resume=resume)
    check_chains(config, config_dir)
    check_sources(config, config_dir)
    if trains:
        check_agents(config, config_dir)
    return config, config_dir


def result_data(result: TrainingResult) -> dict[str, Any]:
    """A training result as JSON data."""
    evaluations = [
        {
            "name": done.spec.name,
            "policy": done.spec.policy,
            "version": done.spec.version,
            "mean": done.mean,
            "stderr": done.stderr,
            "sources": {source: score.mean for source, score in done.sources.items()},
        }
        for done in result.evaluations
    ]
    return {
        "run_dir": str(result.run_dir),
        "complete": result.complete,
        "wall_s": round(result.wall_s, 2),
        **result.summary,
        "evaluations": evaluations,
    }


def _show(result: TrainingResult, config: Config, warnings: Sequence[str]) -> None:
    """The evaluations, what went wrong on the way, and where everything lies (unwrapped, so that it can be copied)."""
    console = PlainConsole()
    if result.evaluations:
        console.print(_result_table(result))
    lines = [f"warning: {warning}" for warning in warnings]
    lines += [f"ended early: {ended}"] if (ended := result.summary.get("ended")) else []
    lines += [f"run directory: {result.run_dir}", f"look inside:   wingbeat inspect {result.run_dir}"]
    if result.complete:
        trained = [name for name, policy in config.policies.items() if policy.trainable]
        lines += [f"trained model: {result.run_dir / 'export' / name}" for name in trained]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _result_table(result: TrainingResult) -> Table:
    table = Table(title=f"held-out reward ({result.wall_s:.0f} s in all)")
    several = len(result.policies) > 1
    for column in ("evaluation", "version", "reward", "standard error"):
        table.add_column(column, justify="left" if column == "evaluation" else "right")
    for done in result.evaluations:
        mean = "none" if done.mean is None else f"{done.mean:.3f}"
        stderr = "none" if done.stderr is None else f"{done.stderr:.3f}"
        name = f"{done.spec.name} of {done.spec.policy}" if several else done.spec.name
        table.add_row(name, str(done.spec.version), mean, stderr)
        for source, score in done.sources.items() if len(done.sources) > 1 else ():
            shown = ["none" if value is None else f"{value:.3f}" for value in (score.mean, score.stderr)]
            table.add_row(f"  {source}", "", *shown)
    captions = [
        (f"{policy}: " if several else "")
        + f"difference {found.mean:+.3f}, 95% interval {found.low:+.3f} to {found.high:+.3f}"
        f" (paired over {found.num_tasks} held-out tasks)"
        for policy in result.policies
        if (found := result.difference(policy)) is not None
    ]
    table.caption = "\n".join(captions) or None
    return table


def _announce(supervisor: Supervisor) -> None:
    console = PlainConsole()
    console.print(f"serving at {supervisor.url}, run directory {supervisor.run_dir}", soft_wrap=True)
    where, url = reach(supervisor.url, supervisor.config.server.allowed_hosts or ())
    console.print(f"run agents {where}: wingbeat rollout agent.py --server {url}", soft_wrap=True)


def reach(url: str, names: Sequence[str]) -> tuple[str, str]:
    """From where a server can be called, and how: nobody else can call 0.0.0.0, and no certificate is of that name."""
    host = urlsplit(url).hostname or ""
    if is_loopback(host):
        return "on this machine", url
    if host not in EVERY_ADDRESS:
        return "from any machine", url
    name = next((name for name in names if not is_loopback(name)), "HOST")
    return "from any machine", urlsplit(url)._replace(netloc=f"{name}:{urlsplit(url).port}").geturl()
