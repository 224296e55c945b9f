"""``wingbeat eval``: score a policy version on held-out tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from wingbeat.cli.connection import DEFAULT_URL, AdminKeyOption, ServerOption
from wingbeat.cli.terminal import PlainConsole
from wingbeat.client import Swarm
from wingbeat.core.protocol import EvaluationReply, EvaluationRequest


def evaluate(
    server: ServerOption = DEFAULT_URL,
    key: AdminKeyOption = None,
    source: Annotated[str | None, typer.Option(help="The task source; unset: all.")] = None,
    policy: Annotated[str | None, typer.Option(help="The policy; unset: the only one.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Its version; unset: the live one.")] = None,
    samples_per_task: Annotated[int, typer.Option(min=1, max=256, help="Episodes per task.")] = 1,
    max_tasks: Annotated[int | None, typer.Option(min=1, help="Tasks at most; unset: all.")] = None,
    name: Annotated[str, typer.Option(help="Names the result in the run's records.")] = "eval",
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Evaluate on a running server; agents (`train` or `rollout`) must be there to run the episodes."""
    request = EvaluationRequest(
        source=source,
        policy=policy,
        version=version,
        samples_per_task=samples_per_task,
        max_tasks=max_tasks,
        name=name,
    )
    progress = Console(stderr=True)
    with Swarm(server, key, retry_budget_s=10.0) as swarm, progress.status("starting") as status:
        reply = swarm.evaluate(
            request, poll_s=0.5, on_progress=lambda r: status.update(f"{r.num_finished} of {r.num_expected} episodes")
        )
    if json_output:
        typer.echo(reply.model_dump_json())
    else:
        PlainConsole().print(result_table(reply))


def result_table(reply: EvaluationReply) -> Table:
    """The result with its standard error, and how the tasks fared."""
    table = Table(title=f"{reply.policy}@{reply.version}: evaluation {reply.evaluation_id}", show_header=False)
    means = [math.fsum(rewards) / len(rewards) for rewards in reply.rewards.values() if rewards]
    table.add_row("mean reward", _number(reply.mean_reward))
    table.add_row("standard error", _number(reply.stderr))
    table.add_row("episodes", f"{reply.num_finished} of {reply.num_expected}")
    table.add_row("tasks", str(len(means)))
    if len(reply.sources) > 1:
        for source, score in reply.sources.items():
            error = "" if score.stderr is None else f" (standard error {score.stderr:.4f})"
            table.add_row(f"mean reward of {source}", f"{_number(score.mean_reward)}{error}, {score.num_tasks} tasks")
    if reply.agents:
        table.add_row("agent", shown_agents(reply.agents))
    if means:
        table.add_row("worst, best task", f"{min(means):.3f}, {max(means):.3f}")
    return table


def shown_agents(agents: Mapping[str, int]) -> str:
    """The version that ran an evaluation; several, where they ran it together."""
    if len(agents) == 1:
        return next(iter(agents))
    return "MIXED: " + ", ".join(f"{agent} {count}" for agent, count in agents.items())


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
