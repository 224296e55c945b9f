"""The environment's entry in the registry, and the preset that trains the tiny model on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wingbeat.environments import Kind, without_variant


def make(options: Mapping[str, Any]) -> Any:
    """The environment; its tools load only here."""
    from wingbeat.environments.retrieval.environment import RetrievalEnvironment

    return RetrievalEnvironment(options)


KIND = Kind(
    make=without_variant("retrieval", make),
    summary="questions of one or two hops about an invented world, answered with a search tool",
    preset={
        "run": {"name": "retrieval", "steps": 120},
        "policies": {"solver": {"model": "builtin:retrieval"}},
        "tasks": {
            "options": {
                "num_people": 400,
                "hops": [1],
                "size": 800,
                "eval_size": 200,
                "results": 1,
                "max_turns": 2,
                "max_tokens": 32,
            }
        },
        "eval": {"max_tasks": 200},
    },
)
