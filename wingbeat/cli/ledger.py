"""``wingbeat ledger``: what to do about a run's ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.cli.doctor import require_server

ledger = typer.Typer(name="ledger", help="Care for a run's ledger.", no_args_is_help=True)


@ledger.callback()
def ledger_commands() -> None:
    """Care for a run's ledger."""


@ledger.command()
def restore(run_dir: Annotated[Path, typer.Argument(help="The directory of a run that no server runs.")]) -> None:
    """Go back to the ledger's last good copy; the damaged file stays beside it."""
    require_server()
    from wingbeat.dataflow import ledger_backup

    kept, manifest = ledger_backup.restore(run_dir / "ledger.sqlite")
    age_min = max(0.0, time.time() - manifest.made_s) / 60
    steps = ", ".join(f"{policy!r} at step {step}" for policy, step in sorted(manifest.trained_step.items()))
    typer.echo(f"restored the copy of {age_min:.0f} minutes ago ({steps or 'before the first step'})")
    typer.echo(f"the damaged ledger is {kept}")
    typer.echo("episodes that were finished since are lost; a trainer that is further keeps its weights")
    typer.echo(f"continue with: wingbeat serve --resume {run_dir}")
