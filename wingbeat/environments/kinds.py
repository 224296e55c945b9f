"""What is known of an environment before it is made: how to make it, and the settings that train a tiny model on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from wingbeat.core.errors import ConfigError
from wingbeat.core.ports import Environment

Factory = Callable[[str, Mapping[str, Any]], Environment]
"""Takes what follows the colon of the name ("" without one) and the options."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the registry; light, so that naming an environment loads none of its libraries."""

    make: Factory
    summary: str = ""
    """One line, for lists of what there is."""
    example: str = ""
    """A name that can be made at once, where the kind's own cannot (``reasoning-gym:chain_sum``)."""
    preset: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Tables of a configuration, where they differ from the base preset's (:mod:`wingbeat.environments.presets`)."""


def without_variant(name: str, make: Callable[[Mapping[str, Any]], Environment]) -> Factory:
    """The factory of an environment that has one form only: a name with a colon is refused."""

    def factory(variant: str, options: Mapping[str, Any]) -> Environment:
        if variant:
            raise ConfigError(f"expected the environment {name}, got {name}:{variant}")
        return make(options)

    return factory
