"""Wingbeat trains LLM agents with reinforcement learning.

Importing this package (or :mod:`wingbeat.client`) is cheap: it loads no torch, vllm or ray, so that
machines which only run agents stay light.  The names below load with their first use, so that servers
and workers do not load the client either.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.client import (
        AsyncSwarm,
        AsyncTeam,
        Episode,
        Runner,
        Swarm,
        SyncEpisode,
        SyncTeamEpisode,
        Team,
        TeamEpisode,
        agent,
    )
    from wingbeat.core.types import Group, Outcome, Split, Task
    from wingbeat.tools import tool

__version__ = "0.1.0"

__all__ = [
    "AsyncSwarm",
    "AsyncTeam",
    "Episode",
    "Group",
    "Outcome",
    "Runner",
    "Split",
    "Swarm",
    "SyncEpisode",
    "SyncTeamEpisode",
    "Task",
    "Team",
    "TeamEpisode",
    "__version__",
    "agent",
    "tool",
]

_HOMES = {
    "AsyncSwarm": "wingbeat.client",
    "AsyncTeam": "wingbeat.client",
    "Episode": "wingbeat.client",
    "Group": "wingbeat.core.types",
    "Outcome": "wingbeat.core.types",
    "Runner": "wingbeat.client",
    "Split": "wingbeat.core.types",
    "Swarm": "wingbeat.client",
    "SyncEpisode": "wingbeat.client",
    "SyncTeamEpisode": "wingbeat.client",
    "Task": "wingbeat.core.types",
    "Team": "wingbeat.client",
    "TeamEpisode": "wingbeat.client",
    "agent": "wingbeat.client",
    "tool": "wingbeat.tools",
}


def __getattr__(name: str) -> Any:
    """Load an exported name (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'wingbeat' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
