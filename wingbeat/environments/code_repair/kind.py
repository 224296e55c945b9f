"""The environment's entry in the registry, and the preset that trains the tiny model on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wingbeat.environments import Kind, without_variant


def make(options: Mapping[str, Any]) -> Any:
    """The environment; its tools and sandboxes load only here."""
    from wingbeat.environments.code_repair.environment import CodeRepairEnvironment

    return CodeRepairEnvironment(options)


KIND = Kind(
    make=without_variant("code-repair", make),
    summary="small git repositories with one bug each, repaired in a sandbox; hidden tests decide",
    preset={
        "run": {"name": "code-repair", "steps": 20},
        "policies": {"solver": {"model": "builtin:code-repair", "context_tokens": 640}},
        "tasks": {"options": {"max_turns": 3, "max_tokens": 120}},
        "eval": {"max_tasks": 48},
        "agent": {"concurrency": 16},
    },
)
