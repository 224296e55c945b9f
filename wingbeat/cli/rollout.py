"""``wingbeat rollout``: run an agent file against a server, from any machine."""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated, Any

import typer

from wingbeat.cli.connection import (
    JournalOption,
    KeyOption,
    ResourcesOption,
    ServersOption,
    certificates_hints,
    keys_by_server,
    named_servers,
    resource_servers,
)
from wingbeat.cli.environments import EnvironmentsOption, OptionsOption, read_played
from wingbeat.client import RolloutPlan, RunnerOptions, RunnerStats, run_rollouts, set_up_logging
from wingbeat.core.config import BUILTIN_AGENT
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import KEY_VARIABLE, is_key_variable
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.types import Split

logger = logging.getLogger(__name__)

ABORT_S = 15.0
"""Beyond the grace, what an orphaned client gets to abort its episodes."""


def rollout(
    agent: Annotated[
        str | None, typer.Argument(metavar="[AGENT.py[:NAME]]", help="A file with an @wingbeat.agent function.")
    ] = None,
    environment: EnvironmentsOption = None,
    options: OptionsOption = None,
    server: ServersOption = None,
    key: KeyOption = None,
    journal: JournalOption = None,
    resources: ResourcesOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once in each process.")] = 16,
    processes: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    split: Annotated[list[Split] | None, typer.Option(help="Run only these episodes (repeatable).")] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Run only tasks of this source (repeatable); unset: what the agent says."),
    ] = None,
    max_episodes: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="When the agent's files change, start new processes and let the old ones finish."),
    ] = False,
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds that the episodes of a process get which was replaced.")
    ] = 300.0,
    label: Annotated[str, typer.Option(help="Names this version of the agent in metrics and reports.")] = "",
    grace_s: Annotated[float, typer.Option(min=0, help="Seconds that running episodes get when stopped.")] = 10.0,
    episode_timeout_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds after which an episode ends as timeout, its agent cancelled."),
    ] = None,
    max_memory_mb: Annotated[
        int | None, typer.Option(min=1, help="A client process that holds more MiB is replaced between its episodes.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell of retries and heartbeats too.")] = False,
) -> None:
    """Run an agent: lease episodes and solve them until the server says stop.

    Waits for a server that is away. Ctrl-C lets running episodes end; a second one aborts them. With several servers
    (--server east=URL --server west=URL, the leading one first) either all count an episode, or none does.
    """
    url, servers = named_servers(server)
    if journal is not None and not servers:
        raise SetupError("--journal is of several servers: --server NAME=URL --server NAME=URL")
    level = logging.DEBUG if verbose else logging.INFO
    set_up_logging(level)
    for hint in certificates_hints(servers.values() or [url]):
        logger.warning(hint)
    end_with_supervisor(grace_s=grace_s + ABORT_S)
    runner = RunnerOptions(
        grace_s=grace_s,
        splits=tuple(split or Split),
        sources=tuple(source) if source else None,
        max_episodes=max_episodes,
        label=label,
        episode_timeout_s=episode_timeout_s,
        max_memory_mb=max_memory_mb,
    )
    plan = RolloutPlan(
        **_agent(agent, environment or [], options or []),
        url=url,
        servers=servers,
        key=key,
        keys=keys_by_server(servers),
        journal="" if journal is None else str(journal),
        concurrency=concurrency,
        processes=processes,
        watch=watch,
        drain_s=drain_s,
        options=runner,
        log_level=level,
        resources="wingbeat.resources:of_process",
        resource_urls=resource_servers(resources),
        resource_key=os.environ.get(f"{KEY_VARIABLE}_RESOURCES"),
    )
    _forget_keys()
    _tell(run_rollouts(plan), json_output=json_output)


def _agent(file: str | None, environments: list[str], options: list[str]) -> dict[str, Any]:
    """What a plan says of its agent: a file, or what makes that of environments.  Raises SetupError."""
    if (file is None) != bool(environments):
        raise SetupError("expected a file with an agent, or --environment NAME for the agent of an environment")
    if not environments:
        if options:
            raise SetupError("--options are of an --environment; none is named")
        return {"agent": file}
    from wingbeat.environments.playing import MAKER, agent_settings

    return {"agent": BUILTIN_AGENT, "maker": MAKER, "settings": agent_settings(read_played(environments, options))}


def _forget_keys() -> None:
    """What agents start, for a model perhaps, inherits the rest of the environment."""
    for name in filter(is_key_variable, tuple(os.environ)):
        del os.environ[name]


def _tell(stats: RunnerStats, *, json_output: bool) -> None:
    if json_output:
        counts = {
            "finished": stats.num_finished,
            "failed": stats.num_failed,
            "refused": stats.num_refused,
            "cancelled": stats.num_cancelled,
            "timed_out": stats.num_timed_out,
            "mean_reward": stats.mean_reward,
        }
        typer.echo(json.dumps(counts))
        return
    mean = "" if stats.mean_reward is None else f", mean reward {stats.mean_reward:.3f}"
    typer.echo(
        f"{stats.num_finished} episodes finished{mean}; {stats.num_failed} failed, "
        f"{stats.num_refused} refused, {stats.num_cancelled} cancelled, {stats.num_timed_out} timed out"
    )
