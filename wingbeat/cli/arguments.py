"""The command line of ``serve`` and ``train``: a file, overrides, and what to write instead of a wrong option."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from wingbeat.core.config import Config, load_config, parse_overrides
from wingbeat.core.errors import ConfigError

CONFIG_FILE = Path("config.toml")
"""Taken where no file is named."""
OPTIONS = ("--resume", "--dry-run", "--json", "--help")
NAMED = "NAME"
"""Stands for the name of a policy."""


def read_config(arguments: Sequence[str], resume: Path | None) -> tuple[Config, Path]:
    """The configuration of the command line and the folder that its relative paths start at.

    Raises ConfigError for more than one file, for what is neither a file nor an override, and where there
    is no run to continue.
    """
    if resume is not None and not (resume / "config.toml").is_file():
        raise ConfigError(f"--resume {resume}: expected a run directory, with its config.toml; got none")
    check_options(arguments)
    overrides = [argument for argument in arguments if argument.startswith("-")]
    files = [Path(argument) for argument in arguments if not argument.startswith("-")]
    if len(files) > 1:
        shown = ", ".join(map(str, files))
        raise ConfigError(f"expected one configuration file, got {shown}; overrides look like --section.key=value")
    if not files and resume is None and CONFIG_FILE.is_file():
        files = [CONFIG_FILE]
    if not files and resume is None and not overrides:
        raise ConfigError(
            f"no configuration: name a file (there is no {CONFIG_FILE} here); `wingbeat init NAME` writes one to"
            " start from"
        )
    path = files[0] if files else None if resume is None else resume / "config.toml"
    check_policies(path, overrides)
    return load_config(path, overrides), files[0].absolute().parent if files else Path.cwd()


def check_options(arguments: Sequence[str]) -> None:
    """Raises ConfigError for an option that is none, with the override that was meant."""
    for place, argument in enumerate(arguments):
        key, separator, value = argument.partition("=")
        if not argument.startswith("--") or (separator and ("." in key or key[2:] in Config.model_fields)):
            continue
        following = arguments[place + 1] if place + 1 < len(arguments) else "-"
        if not separator:
            value = "VALUE" if following.startswith("-") else following
        raise ConfigError(_advice(key.removeprefix("--").replace("-", "_"), given=argument, value=value))


def _advice(key: str, *, given: str, value: str) -> str:
    if "." in key:
        return f"{given}: settings take their value after `=`: write --{key}={value}"
    paths = list(setting_paths())
    meant = [path for path in paths if path.rpartition(".")[2] == key]
    if len(meant) == 1:
        return f"unknown option {given}; write --{meant[0]}={value}"
    if meant:
        return f"unknown option {given}; did you mean one of {', '.join(f'--{path}={value}' for path in meant)}?"
    near = difflib.get_close_matches(f"--{key}", OPTIONS, n=1, cutoff=0.75)
    if near:
        return f"unknown option {given}; did you mean {near[0]}?"
    names = difflib.get_close_matches(key, [path.rpartition(".")[2] for path in paths], n=1, cutoff=0.75)
    found = next((path for path in paths if names and path.rpartition(".")[2] == names[0]), None)
    hint = f"did you mean --{found}={value}?" if found else "settings look like --section.key=value"
    return f"unknown option {given}; {hint}"


def setting_paths(section: type[BaseModel] = Config, *, start: str = "") -> Iterator[str]:
    """Dotted paths of all settings, such as ``run.steps`` and ``policies.NAME.model``."""
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        below = next(
            (part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, BaseModel)), None
        )
        path = f"{start}{name}"
        if below is None:
            yield path
        else:
            yield from setting_paths(below, start=f"{path}.{NAMED}." if get_origin(kind) is dict else f"{path}.")


def check_policies(path: Path | None, overrides: Sequence[str]) -> None:
    """Refuse an override of a policy that the file does not have and that the overrides do not make.

    Faults of the file itself are left to the reading of it.
    """
    try:
        known = set(tomllib.loads(path.read_text(encoding="utf-8"))["policies"]) if path is not None else set[str]()
    except (OSError, ValueError, KeyError, TypeError):
        return
    settings = [keys for keys, _ in parse_overrides(overrides) if keys[0] == "policies" and len(keys) > 2]
    made = {keys[1] for keys in settings if keys[2] == "model"}
    for keys in settings:
        name = keys[1]
        if known and name not in known | made:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(sorted(known))}"
            raise ConfigError(f"--{'.'.join(keys)}: no policy {name!r}; {hint}")
