"""Tiny models by name (``model = "builtin:NAME"``): what each imitates before reinforcement.  Loads no torch."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from wingbeat.core.errors import ConfigError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TinyRecipe:
    """How a model of some hundred thousand parameters comes to earn a reward now and then on one environment."""

    phrases: Sequence[str]
    """What its texts are made of: each becomes one token, everything else is spelled in bytes."""
    demonstrate: Callable[[random.Random], list[Message]]
    """One episode of an agent that makes mistakes, as chat messages: what it imitates.  It must not show how held-out
    tasks are solved."""
    tools: Sequence[str] = ()
    """Names of the tools that its requests come with, in their order."""
    max_tokens: int = 256
    """Positions that the model has: the longest conversation."""
    steps: int = 400
    batch: int = 32
    """Demonstrations per step."""
    learning_rate: float = 4e-3
    hidden_size: int = 64
    layers: int = 2


RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "code-repair": "wingbeat.environments.code_repair.recipe:RECIPE",
        "frozen-lake": "wingbeat.environments.adapter_recipes:FROZEN_LAKE",
        "game": "wingbeat.environments.game.recipe:RECIPE",
        "retrieval": "wingbeat.environments.retrieval.recipe:RECIPE",
        "spell-backward": "wingbeat.environments.adapter_recipes:SPELL_BACKWARD",
        "tic-tac-toe": "wingbeat.environments.adapter_recipes:TIC_TAC_TOE",
    }
)
"""Name of a built-in model -> where its recipe is.  The calculator's model, the oldest, is made by its own module."""

CALCULATOR = "calculator"


def builtin_names() -> tuple[str, ...]:
    """What may follow ``builtin:``."""
    return tuple(sorted([CALCULATOR, *RECIPES]))


def builder_of(name: str) -> list[str]:
    """The Python module, with its arguments, that builds a model.  Raises ConfigError for an unknown name."""
    if name == CALCULATOR:
        return ["wingbeat.environments.calculator.model"]
    if name not in RECIPES:
        known = ", ".join(f"`builtin:{known}`" for known in builtin_names())
        raise ConfigError(f"unknown built-in model {name!r}; there are {known}")
    return ["wingbeat.environments.tiny_model", name]


def longest(name: str) -> int:
    """The positions that a built-in model has.  Raises ConfigError for an unknown name."""
    builder_of(name)
    return 256 if name == CALCULATOR else load_recipe(name).max_tokens


def load_recipe(name: str) -> TinyRecipe:
    """The recipe of a built-in model.  Raises KeyError for an unknown name."""
    module, _, attribute = RECIPES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
