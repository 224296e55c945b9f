"""What the built-in agent plays: the environments of a configuration, for the agents whose path is ``builtin``."""

from __future__ import annotations

from collections.abc import Iterator

from wingbeat.core.config import BUILTIN_AGENT, AgentConfig, Config, dump_value
from wingbeat.core.errors import ConfigError
from wingbeat.environments.playing import Played


def played_by(config: Config, agent: AgentConfig, *, key: str = "agent") -> tuple[Played, ...]:
    """The environments that a built-in agent plays; ``key`` names it in faults.

    Raises ConfigError where there is none, and for tasks from a file, which have nobody to play them.
    """
    tasks = config.tasks
    if tasks.environment is not None:
        return (Played(tasks.environment, tasks.options),)
    wanted = {name: source for name, source in tasks.sources.items() if name in (agent.sources or tasks.sources)}
    for name, source in wanted.items():
        if source.environment is None:
            raise ConfigError(
                f"{key}.path is {BUILTIN_AGENT}, and the tasks of tasks.sources.{name} are from a file, which brings no"
                f" agent: name the other sources in {key}.sources, and an agent of your own for this one"
            )
    if not wanted:
        raise ConfigError(
            f"{key}.path is {BUILTIN_AGENT}, which is the agent of an environment, and [tasks] names none: set"
            " tasks.environment, or the path of a file with an @wingbeat.agent function"
        )
    return tuple(Played(str(s.environment), s.options, source=name) for name, s in wanted.items())


def command_line(played: tuple[Played, ...]) -> list[str]:
    """Arguments with which ``wingbeat rollout`` plays these."""
    return [part for one in played for part in _arguments(one)]


def _arguments(played: Played) -> Iterator[str]:
    named, prefix = (f"{played.source}=", f"{played.source}.") if played.source else ("", "")
    yield from ("--environment", f"{named}{played.environment}")
    for key, value in played.options.items():
        yield from ("--options", f"{prefix}{key}={dump_value(value)}")
