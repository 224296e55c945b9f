"""Options of environments come from a configuration file: wrong ones fail by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from wingbeat.core.errors import ConfigError
from wingbeat.core.types import Split

OptionsT = TypeVar("OptionsT", bound="Options")


class Options(BaseModel):
    """Base of an environment's options: strict about unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_options(kind: type[OptionsT], options: Mapping[str, Any], *, environment: str) -> OptionsT:
    """Validated options.  Raises ConfigError that names the option at fault and the known ones."""
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        known = ", ".join(kind.model_fields)
        raise ConfigError(
            f"`tasks.options.{where}` of {environment}: {fault['msg']} (got {fault['input']!r}); known options: {known}"
        ) from error


def read_split(split: str) -> Split:
    """``train`` or ``eval``.  Raises ConfigError."""
    try:
        return Split(split)
    except ValueError as error:
        raise ConfigError(f"expected the split train or eval, got {split!r}") from error
