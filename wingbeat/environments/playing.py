"""The built-in agent: plays each episode with the environment that its task is of.

This is what ``agent.path = "builtin"`` and ``wingbeat rollout --environment NAME`` run.  A client process gets names
and options, as data, and makes the environments itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from wingbeat.client import Agent, Episode
from wingbeat.core.errors import ConfigError
from wingbeat.core.ports import PlayedEnvironment
from wingbeat.core.types import Split
from wingbeat.environments.registry import make_played

MAKER = f"{__name__}:make_agent"
"""What a plan names to have this agent."""


@dataclass(frozen=True, slots=True)
class Played:
    """One environment to play, and whose tasks are its."""

    environment: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = ""
    """The task source; "": the sources of the environment's own tasks."""


_PLAYED = TypeAdapter(tuple[Played, ...])


def agent_settings(played: Sequence[Played]) -> dict[str, Any]:
    """What :func:`make_agent` takes, as JSON data."""
    return {"played": _PLAYED.dump_python(tuple(played), mode="json")}


def make_agent(settings: Mapping[str, Any]) -> Agent:
    """The agent of some environments.  Raises ConfigError where one has no agent of its own, or two share a source."""
    sources: dict[str, PlayedEnvironment] = {}
    for one in _PLAYED.validate_python(settings["played"]):
        made = make_played(one.environment, one.options)
        for source in [one.source] if one.source else own_sources(made):
            if source in sources:
                raise ConfigError(f"expected one environment for each task source, got two for {source!r}")
            sources[source] = made

    async def play(episode: Episode) -> float | Mapping[str, float] | None:
        return await sources[episode.task.source].play(episode)

    return Agent(play, sources=tuple(sources))


def own_sources(environment: PlayedEnvironment) -> list[str]:
    """The sources of an environment's tasks: nearly always one, its name."""
    return sorted({task.source for split in Split for task in environment.tasks(split)})
