"""``wingbeat ledger``: what to do about a run's ledger."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.cli.doctor import require_server
from wingbeat.core.errors import LedgerCorrupt, SetupError

ledger = typer.Typer(name="ledger", help="Care for a run's ledger.", no_args_is_help=True)


@ledger.callback()
def ledger_commands() -> None:
    """Care for a run's ledger."""


@ledger.command()
def restore(
    run_dir: Annotated[Path, typer.Argument(help="The directory of a run that no server runs.")],
    force: Annotated[bool, typer.Option("--force", help="Also where the ledger is sound.")] = False,
) -> None:
    """Go back to the ledger's last good copy; the damaged file stays beside it."""
    require_server()
    from wingbeat.cli.inspect import check_run_dir
    from wingbeat.dataflow import ledger_backup

    path = run_dir / "ledger.sqlite"
    has_copy = ledger_backup.backup_of(path).is_file()
    if not has_copy:
        check_run_dir(run_dir)
    if has_copy and path.is_file() and not force and _is_sound(run_dir):
        raise SetupError(
            f"the ledger of {run_dir} is sound: going back to the copy would lose what was finished since; nothing was"
            " done (--force does it all the same)"
        )
    kept, manifest = ledger_backup.restore(path)
    age_min = max(0.0, time.time() - manifest.made_s) / 60
    age = f"{age_min:.0f} minutes" if age_min >= 1.5 else f"{age_min * 60:.0f} seconds"
    steps = ", ".join(f"{policy!r} at step {step}" for policy, step in sorted(manifest.trained_step.items()))
    typer.echo(f"restored the copy of {age} ago ({steps or 'before the first step'})")
    typer.echo(f"the ledger that was there is {kept}")
    typer.echo("episodes that were finished since are lost; a trainer that is further keeps its weights")
    typer.echo(f"continue with: wingbeat serve --resume {run_dir}")


def _is_sound(run_dir: Path) -> bool:
    """Whether nothing is wrong with a ledger that no server writes.  Raises SetupError where one does."""
    from wingbeat.dataflow.audit import audit_run
    from wingbeat.dataflow.ledger_damage import is_damage
    from wingbeat.dataflow.ledger_opening import lock_ledger

    with lock_ledger(run_dir / "ledger.sqlite"):
        try:
            return not audit_run(run_dir)
        except LedgerCorrupt:
            return False
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if is_damage(error):
                return False
            raise
