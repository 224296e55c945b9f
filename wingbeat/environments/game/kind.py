"""The environment's entry in the registry, and the preset that trains two tiny models against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wingbeat.environments import Kind, without_variant


def make(options: Mapping[str, Any]) -> Any:
    from wingbeat.environments.game.environment import GameEnvironment

    return GameEnvironment(options)


_TRAINER = {
    "algorithm": "rloo",
    "learning_rate": 1.5e-3,
    "entropy_coef": 0.01,
    "schedule": "linear",
    "warmup_steps": 5,
    "min_lr_ratio": 0.1,
    "betas": [0.9, 0.95],
    "weight_decay": 0.0,
    "threads": 1,
}
_PLAYER = {"model": "builtin:game", "context_tokens": 192, "trainer": _TRAINER}

KIND = Kind(
    make=without_variant("game", make),
    summary="Nim between two policies, or one and itself; held-out games against random moves",
    preset={
        "run": {"name": "game", "steps": 80},
        "policies": {"left": _PLAYER, "right": _PLAYER},
        "tasks": {"options": {"num_heaps": 2, "max_heap": 5}},
        "eval": {"samples_per_task": 10},
    },
)
