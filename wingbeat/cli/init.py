"""``wingbeat init``: a project folder that trains at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer

from wingbeat.core.errors import SetupError
from wingbeat.environments.calculator import DEMO_PRESET

FILES = ("agent.py", "tasks.py", "config.toml", "README.md")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def init(name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")]) -> None:
    """Make a folder with an agent, its tasks and a configuration that trains within minutes."""
    scaffold(name, preset=asdict(DEMO_PRESET))
    typer.echo(f"made {name}: {', '.join(FILES)}\nnext: cd {name} && wingbeat train config.toml")


def scaffold(folder: Path, *, preset: Mapping[str, Any]) -> None:
    """Write the files of a new project; ``preset`` are the settings that teach the built-in model.

    Never overwrites.  Raises SetupError if the folder holds anything or cannot be written.
    """
    title = folder.absolute().name
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SetupError(
                f"expected a new or empty folder, got {folder}, which holds something; choose another name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            text = files("wingbeat.cli.scaffold").joinpath(file).read_text(encoding="utf-8")
            (folder / file).write_text(_fill(file, text, title=title, preset=preset), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"cannot write {folder}: {error}") from error


def _fill(file: str, text: str, *, title: str, preset: Mapping[str, Any]) -> str:
    if file == "README.md":
        return Template(text).substitute(title=title)
    if file != "config.toml":
        return text
    run_name = title if _RUN_NAME.fullmatch(title) else "run"
    return fill_toml(text, {**preset, "name": run_name})


def fill_toml(template: str, values: Mapping[str, Any]) -> str:
    """A TOML template with each ``$key`` as a TOML value; lines whose value is None are left out."""
    kept = [line for line in template.splitlines(keepends=True) if not _is_unset(line, values)]
    return Template("".join(kept)).substitute({key: json.dumps(value) for key, value in values.items()})


def _is_unset(line: str, values: Mapping[str, Any]) -> bool:
    _, separator, key = line.strip().partition("= $")
    return bool(separator) and values.get(key, "") is None
