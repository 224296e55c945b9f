"""The ``wingbeat`` command: thin commands over the packages below, which load only when they run.

Faults that the user can fix end with one line on standard error: exit code 2 for this machine or the
configuration (SetupError), 1 for what a server answered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from wingbeat import __version__
from wingbeat.cli.deploy import deploy, scale
from wingbeat.cli.doctor import doctor, require_server
from wingbeat.cli.engine import engine
from wingbeat.cli.evaluate import evaluate
from wingbeat.cli.init import init
from wingbeat.cli.keys import keys
from wingbeat.cli.ledger import ledger as ledger_commands
from wingbeat.cli.resources import resources
from wingbeat.cli.rollout import rollout
from wingbeat.cli.run import serve, train
from wingbeat.client import leave_in_time
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.core.types import Split


def missing_package(module: str) -> str:
    """What to tell where a command needs more than the light client."""
    return (
        f"this command needs the module {module!r}, which is not installed; install the server from a clone:"
        " pip install '.[server]' -c constraints.txt (`wingbeat doctor` lists what is missing)"
    )


class OneLineErrors(TyperGroup):
    """Reports our own errors as ``error: ...`` without a traceback; anything else is a bug and shows its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WingbeatError as error:
            typer.echo(f"error: {' '.join(error.message.split())}", err=True)
            raise typer.Exit(error.exit_code if isinstance(error, SetupError) else 1) from error
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "wingbeat":  # a fault of ours
                raise
            typer.echo(f"error: {missing_package(error.name)}", err=True)
            raise typer.Exit(SetupError.exit_code) from error


app = typer.Typer(
    name="wingbeat",
    cls=OneLineErrors,
    help="Reinforcement learning of LLM agents: a server trains, any OpenAI-compatible agent learns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_OVERRIDABLE = {"ignore_unknown_options": True}

app.command(context_settings=_OVERRIDABLE)(serve)
app.command(context_settings=_OVERRIDABLE)(train)
app.add_typer(keys)
app.add_typer(ledger_commands)
app.add_typer(deploy)
app.command()(scale)
app.command()(init)
app.command()(engine)
app.command(context_settings=_OVERRIDABLE)(resources)
app.command()(rollout)
app.command(name="eval", context_settings=_OVERRIDABLE)(evaluate)
app.command()(doctor)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seeds everything.")] = 0,
    control: Annotated[
        str,
        typer.Option(
            help="none; lr0, shuffled-advantages: nothing should be learnt; true-advantages: its counterpart."
        ),
    ] = "none",
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Where to make the run directory.")] = Path("runs"),
) -> None:
    """Teach a small agent to use a calculator, on this machine, in minutes."""
    require_server("openai", "matplotlib")
    from wingbeat.cli.demo import run_demo

    run_demo(seed=seed, control=control, json_output=json_output, directory=directory)


@app.command()
def inspect(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    episode: Annotated[str | None, typer.Argument(help="An episode id, to see its tokens.")] = None,
    merge_report: Annotated[
        bool, typer.Option("--merge-report", help="What timeline merging saved, and why agents forked.")
    ] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="What the ledger holds, and whether it contradicts itself.")
    ] = False,
    agents: Annotated[bool, typer.Option("--agents", help="How the versions of agents compare.")] = False,
    full: Annotated[bool, typer.Option("--full", help="With an episode: every token of long prompts, too.")] = False,
) -> None:
    """Show a run, one episode of it token by token, its ledger, its agents, or what merging its timelines saved."""
    from wingbeat.cli.inspect import Report, run_inspect

    asked = {Report.MERGING: merge_report, Report.LEDGER: ledger, Report.AGENTS: agents}
    if not run_inspect(run_dir, episode, reports=[report for report, is_asked in asked.items() if is_asked], full=full):
        raise typer.Exit(1)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    episodes: Annotated[Path, typer.Option("--episodes", help="A new file: .jsonl or .parquet.")],
    split: Annotated[Split | None, typer.Option(help="Only these episodes.")] = None,
    messages: Annotated[bool, typer.Option("--messages", help="Every turn with its messages.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Every turn with token ids and logprobs.")] = False,
) -> None:
    """Write a run's episodes, one row per attempt, to a file for other tools."""
    from wingbeat.cli.export import RowOptions, run_export

    count = run_export(run_dir, episodes, split=split, options=RowOptions(messages=messages, tokens=tokens))
    typer.echo(f"{count} attempts written to {episodes}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """The console script."""
    try:
        sys.exit(app())
    except SystemExit as end:
        if sys.argv[1:2] == [rollout.__name__]:  # it has run code of others
            leave_in_time(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
