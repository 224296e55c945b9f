"""Options with which commands name environments: ``--environment NAME --options key=value``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wingbeat.core.config import parse_value
from wingbeat.core.errors import SetupError

if TYPE_CHECKING:
    from wingbeat.environments.playing import Played

EnvironmentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--environment",
        metavar="[SOURCE=]NAME",
        help="In place of a file: the agent of this environment; SOURCE, where its tasks have another source than its"
        " name (repeatable).",
    ),
]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option("--options", metavar="KEY=VALUE", help="An option of the environment (repeatable)."),
]


def read_settings(given: Sequence[str]) -> dict[str, Any]:
    """``["size=20", "box.limit=3"]`` as options; values are TOML where they parse, else strings.  Raises SetupError."""
    settings: dict[str, Any] = {}
    for text in given:
        key, separator, value = text.partition("=")
        *sections, last = key.split(".")
        table = settings
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise SetupError(f"--options {text}: {section!r} is a value already, not a table")
        if not separator or not last:
            raise SetupError(f"--options: expected KEY=VALUE, got {text!r}")
        table[last] = parse_value(value)
    return settings


def read_played(environments: Sequence[str], options: Sequence[str]) -> tuple[Played, ...]:
    """The environments of a command line, each ``NAME`` or ``SOURCE=NAME``.

    Options of an environment that is named with its source begin with ``SOURCE.``.  Raises SetupError.
    """
    from wingbeat.environments.playing import Played

    pairs = [(source, name) for source, _, name in (text.rpartition("=") for text in environments)]
    if len(pairs) > 1 and not all(source for source, _ in pairs):
        raise SetupError("--environment: of several, each is SOURCE=NAME, with the task source that it plays")
    left = list(options)
    found: list[Played] = []
    for source, name in pairs:
        prefix = f"{source}." if source else ""
        own = [text for text in left if text.startswith(prefix)]
        left = [text for text in left if text not in own]
        found.append(Played(name, read_settings([text.removeprefix(prefix) for text in own]), source))
    if left:
        raise SetupError(f"--options: expected SOURCE.KEY=VALUE with a SOURCE of --environment, got {left[0]!r}")
    return tuple(found)
