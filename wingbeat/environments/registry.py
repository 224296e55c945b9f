"""Environments by name: the one place to add another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from wingbeat.core.errors import ConfigError
from wingbeat.core.ports import Environment
from wingbeat.environments.calculator_environment import CalculatorEnvironment
from wingbeat.environments.reasoning_gym import ReasoningGymEnvironment

Factory = Callable[[str, Mapping[str, Any]], Environment]
"""Takes what follows the colon of the name ("" without one) and the options."""


def _calculator(variant: str, options: Mapping[str, Any]) -> Environment:
    if variant:
        raise ConfigError(f"expected the environment calculator, got calculator:{variant}")
    return CalculatorEnvironment(options)


def _reasoning_gym(family: str, options: Mapping[str, Any]) -> Environment:
    if not family:
        raise ConfigError("expected a family, as in reasoning-gym:chain_sum, got reasoning-gym alone")
    return ReasoningGymEnvironment(family, options)


_FACTORIES: Mapping[str, Factory] = MappingProxyType({"calculator": _calculator, "reasoning-gym": _reasoning_gym})


def environment_names() -> tuple[str, ...]:
    """What ``tasks.environment`` may begin with."""
    return tuple(sorted(_FACTORIES))


def make_environment(spec: str, options: Mapping[str, Any] | None = None) -> Environment:
    """The environment that a name like ``calculator`` or ``reasoning-gym:chain_sum`` stands for.

    Raises ConfigError for an unknown name or option, DependencyMissing if its library is not installed.
    """
    name, _, variant = spec.partition(":")
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"expected an environment out of {', '.join(environment_names())}, got {spec!r}")
    return factory(variant, options or {})
