"""Reading configuration: TOML file, then ``--a.b=c`` overrides, then validation with helpful errors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from wingbeat.core.config.faults import explain
from wingbeat.core.config.schema import Config
from wingbeat.core.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The validated configuration of a TOML file plus overrides.

    Raises ConfigError in one line: what is wrong, where, and for an unknown key the nearest known one.
    """
    return validate_config(read_tables(path, overrides))


def read_tables(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file plus overrides, as they are.  Raises ConfigError."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"no configuration file at {path}; `wingbeat init NAME` writes one to start from"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return apply_overrides(data, parse_overrides(overrides))


def parse_overrides(arguments: Sequence[str]) -> list[tuple[tuple[str, ...], Any]]:
    """``["--a.b=c"]`` to ``[(("a", "b"), value)]``; values are TOML where they parse, else strings."""
    parsed: list[tuple[tuple[str, ...], Any]] = []
    for argument in arguments:
        key, separator, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not separator or not all(key.split(".")):
            raise ConfigError(f"unknown argument {argument!r}: overrides look like --section.key=value")
        parsed.append((_parse_key(key), parse_value(text)))
    return parsed


def _parse_key(key: str) -> tuple[str, ...]:
    """Dashes may stand for underscores in settings; a name of the user's is what it is."""
    first, *rest = key.split(".")
    if first == "tasks" and rest[:1] in (["sources"], ["ratios"]):
        return (first, *rest[:2], *(part.replace("-", "_") for part in rest[2:]))
    name = rest[:1] if first in ("policies", "agents") else []
    return (first.replace("-", "_"), *name, *(part.replace("-", "_") for part in rest[len(name) :]))


def parse_value(text: str) -> Any:
    """A value of the command line: TOML where it parses, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """A deep copy of ``data`` with each dotted path set."""
    result: dict[str, Any] = json.loads(json.dumps(data))
    for path, value in overrides:
        node = result
        for part in path[:-1]:
            child: Any = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(f"--{'.'.join(path)}: {part!r} is a value, not a section")
            node = cast(dict[str, Any], child)
        node[path[-1]] = value
    return result


def validate_config(data: Mapping[str, Any]) -> Config:
    """Validate, turning pydantic's report into one line per fault."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(map(dict, error.errors()), root=Config)) from error


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML that :func:`load_config` reads back to an equal value."""
    return dump_tables(config.model_dump(mode="json", exclude_none=True))


def dump_tables(data: Mapping[str, Any]) -> str:
    """JSON data without nulls as TOML."""
    lines: list[str] = []
    _dump_table(data, (), lines)
    return "\n".join(lines).strip() + "\n"


def _dump_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    sections = {k: cast(Mapping[str, Any], v) for k, v in table.items() if isinstance(v, Mapping)}
    scalars = {k: v for k, v in table.items() if k not in sections}
    if path and (scalars or not table):
        lines += ["", f"[{'.'.join(_dump_key(p) for p in path)}]"]
    lines += [f"{_dump_key(k)} = {dump_value(v)}" for k, v in scalars.items()]
    for key, section in sections.items():
        _dump_table(section, (*path, key), lines)


def _dump_key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else json.dumps(key)


def dump_value(value: Any) -> str:
    """JSON data as a value in TOML."""
    if isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value).items()
        return "{" + ", ".join(f"{_dump_key(k)} = {dump_value(v)}" for k, v in entries) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(dump_value(v) for v in cast(list[Any], value)) + "]"
    if isinstance(value, float) and value != value:
        return "nan"
    return json.dumps(value)
