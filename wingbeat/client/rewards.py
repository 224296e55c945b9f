"""What agents may give as a reward, turned into the wire's form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeAlias

from pydantic import ValidationError

from wingbeat.core.errors import InvalidReward
from wingbeat.core.protocol import Rewards

RewardLike: TypeAlias = SupportsFloat | Rewards | Mapping[str, Any]
"""A number for every policy; ``{"solver": 1.0, "solver:planner": 0.5}`` by policy or ``policy:agent``;
or :class:`Rewards` (also as a dict with its keys ``policies``, ``agents`` and ``turns``)."""

_SECTIONS = frozenset(Rewards.model_fields)


def to_rewards(value: RewardLike) -> float | Rewards:
    """The wire form of a reward.  Raises InvalidReward for anything that is not finite numbers."""
    if isinstance(value, Rewards):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(value)
    return _number(value, "the reward")


def to_metrics(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
    """Metrics as plain floats.  Raises InvalidReward naming the metric at fault."""
    return {name: _number(value, f"metric {name!r}") for name, value in (metrics or {}).items()}


def _from_mapping(value: Mapping[str, Any]) -> Rewards:
    if value and set(value) <= _SECTIONS and all(isinstance(part, Mapping) for part in value.values()):
        try:
            return Rewards.model_validate(dict(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidReward(f"reward {where}: {first['msg']} (got {first['input']!r})", param="rewards") from error
    if not value:
        raise InvalidReward("expected a reward for at least one policy, got an empty mapping", param="rewards")
    numbers = {str(name): _number(part, f"the reward of {name!r}") for name, part in value.items()}
    return Rewards(
        policies={name: number for name, number in numbers.items() if ":" not in name},
        agents={name: number for name, number in numbers.items() if ":" in name},
    )


def _number(value: Any, what: str) -> float:
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise InvalidReward(f"{what}: expected a number, got {value!r}", param="rewards")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InvalidReward(f"{what}: expected a number, got {value!r} ({error})", param="rewards") from error
    if not math.isfinite(number):
        raise InvalidReward(f"{what}: expected a finite number, got {number}", param="rewards")
    return number
