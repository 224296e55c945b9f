"""What ``wingbeat resources`` reads: its own sections, from a file of its own or from that of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from wingbeat.core.config.faults import explain
from wingbeat.core.config.load import read_tables, validate_config
from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.config.schema import RunConfig
from wingbeat.core.config.section import Section
from wingbeat.core.config.server import ServerConfig
from wingbeat.core.errors import ConfigError


class LendingConfig(Section):
    """The sections of a resources server: ``[server]`` says who may call and how, and ``[run]`` where keys lie."""

    run: RunConfig = RunConfig()
    server: ServerConfig = ServerConfig()
    resources: ResourcesConfig = ResourcesConfig()


def load_lending(path: Path | None, overrides: Sequence[str] = ()) -> LendingConfig:
    """Raises ConfigError, as :func:`wingbeat.core.config.load_config` does."""
    data = read_tables(path, overrides)
    if "policies" in data:
        config = validate_config(data)
        return LendingConfig(run=config.run, server=config.server, resources=config.resources)
    try:
        return LendingConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(map(dict, error.errors()), root=LendingConfig)) from error
