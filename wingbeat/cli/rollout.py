"""``wingbeat rollout``: run an agent file against a server, from any machine."""

from __future__ import annotations

import json
import logging
from typing import Annotated

import typer

from wingbeat.cli.connection import DEFAULT_URL, KeyOption, ServerOption
from wingbeat.client import RolloutPlan, RunnerOptions, run_rollouts, set_up_logging
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.types import Split

ABORT_S = 15.0
"""Beyond the grace, what an orphaned client gets to abort its episodes."""


def rollout(
    agent: Annotated[str, typer.Argument(metavar="AGENT.py[:NAME]", help="A file with an @wingbeat.agent function.")],
    server: ServerOption = DEFAULT_URL,
    key: KeyOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once in each process.")] = 16,
    processes: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    split: Annotated[list[Split] | None, typer.Option(help="Run only these episodes (repeatable).")] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Run only tasks of this source (repeatable); unset: what the agent says."),
    ] = None,
    max_episodes: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    grace_s: Annotated[float, typer.Option(min=0, help="Seconds that running episodes get when stopped.")] = 10.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell of retries and heartbeats too.")] = False,
) -> None:
    """Run an agent: lease episodes and solve them until the server says stop.

    Waits for a server that is away. Ctrl-C lets running episodes end; a second one aborts them.
    """
    level = logging.DEBUG if verbose else logging.INFO
    set_up_logging(level)
    end_with_supervisor(grace_s=grace_s + ABORT_S)
    sources = tuple(source) if source else None
    options = RunnerOptions(grace_s=grace_s, splits=tuple(split or Split), sources=sources, max_episodes=max_episodes)
    plan = RolloutPlan(
        agent=agent,
        url=server,
        key=key,
        concurrency=concurrency,
        processes=processes,
        options=options,
        log_level=level,
        resources="wingbeat.resources:LocalPool",
    )
    stats = run_rollouts(plan)
    if json_output:
        counts = {
            "finished": stats.num_finished,
            "failed": stats.num_failed,
            "refused": stats.num_refused,
            "cancelled": stats.num_cancelled,
            "mean_reward": stats.mean_reward,
        }
        typer.echo(json.dumps(counts))
        return
    mean = "" if stats.mean_reward is None else f", mean reward {stats.mean_reward:.3f}"
    typer.echo(
        f"{stats.num_finished} episodes finished{mean}; {stats.num_failed} failed, "
        f"{stats.num_refused} refused, {stats.num_cancelled} cancelled"
    )
