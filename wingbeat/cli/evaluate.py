"""``wingbeat eval``: score a policy version on held-out tasks, or a model on an environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from wingbeat.cli.arguments import check_options
from wingbeat.cli.connection import DEFAULT_URL, AdminKeyOption
from wingbeat.cli.environments import OptionsOption, read_settings
from wingbeat.cli.run import INTERRUPTED
from wingbeat.cli.terminal import PlainConsole
from wingbeat.client import Swarm
from wingbeat.core.config import BUILTIN_AGENT, Config, PolicyConfig, apply_overrides, parse_overrides, validate_config
from wingbeat.core.errors import SetupError
from wingbeat.core.protocol import EvaluationReply, EvaluationRequest
from wingbeat.deploy.checks import positions_of

CONTEXT_TOKENS = 4096
"""Of a model that is not the preset's, unless an override says another number."""
BUILTIN = "builtin:"


def evaluate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--SECTION.KEY=VALUE]...", help="With --environment: settings of the server that is started."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "--url",
            envvar="WINGBEAT_URL",
            help=f"The server's URL; unset: {DEFAULT_URL}, and with --environment one that is started for it.",
        ),
    ] = None,
    key: AdminKeyOption = None,
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Play the held-out tasks of this environment with its own agent."),
    ] = None,
    options: OptionsOption = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --environment: a folder, .gguf file, pypi:PACKAGE or hub name; unset: a tiny one."),
    ] = None,
    preset: Annotated[
        bool,
        typer.Option(
            "--preset", help="With --model: the preset's options and context, for what was trained with them."
        ),
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="With --environment: episodes at once.")] = 16,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="With --environment: keep the run directory, in this folder.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="The task source; unset: all.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="The policy; unset: the only trainable one (--environment: the first).")
    ] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Its version; unset: the live one.")] = None,
    samples_per_task: Annotated[
        int, typer.Option("--samples-per-task", "--samples", min=1, max=256, help="Episodes per task.")
    ] = 1,
    max_tasks: Annotated[
        int | None, typer.Option("--max-tasks", "--tasks", min=1, help="Tasks at most; unset: all.")
    ] = None,
    name: Annotated[str, typer.Option(help="Names the result in the run's records.")] = "eval",
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Score on held-out tasks: a running server's policy, or with --environment any model, without a server.

    Without --environment agents (`train` or `rollout`) must be there to run the episodes.
    """
    request = EvaluationRequest(
        source=source,
        policy=policy,
        version=version,
        samples_per_task=samples_per_task,
        max_tasks=max_tasks,
        name=name,
    )
    of_ours = {"model": model, "dir": directory, "preset": preset or None}
    if environment is None:
        _refuse_others(arguments, {"options": options, **of_ours}, why="goes with --environment only")
        reply, run_dir = _on_server(request, server or DEFAULT_URL, key), None
    else:
        _refuse_others((), {"source": source}, why="does not go with --environment, which has tasks of its own")
        if server is None:
            _refuse_others((), {"version": version}, why="needs --server: the model played here has one version")
        else:
            _refuse_others(arguments, of_ours, why="does not go with --server, which has a model and a run of its own")
        given = read_settings(options or ())
        is_tiny = server is None and (model is None or model.startswith(BUILTIN))
        config = environment_config(environment, given, model=model, preset=preset or is_tiny, over=arguments or ())
        if model is not None and not preset:
            _check_positions(config, model, environment)
        config = _placed(config, concurrency=concurrency, directory=directory)
        reply, run_dir = _on_environment(config, request, server=server, key=key, keep=directory is not None)
    _show(reply, run_dir, as_json=json_output)


def _show(reply: EvaluationReply, run_dir: Path | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(reply.model_dump_json())
        return
    console = PlainConsole()
    console.print(result_table(reply))
    if run_dir is not None:
        console.print(f"run directory: {run_dir}", soft_wrap=True, highlight=False)


def _refuse_others(arguments: Sequence[str] | None, given: Mapping[str, Any], *, why: str) -> None:
    """Raises SetupError for what has no effect beside the other options."""
    check_options(arguments or ())
    for option, value in given.items():
        if value is not None:
            raise SetupError(f"--{option} {why}")
    if arguments:
        raise SetupError(f"{arguments[0]}: settings are of the server that --environment starts, and none is started")


def _on_server(request: EvaluationRequest, server: str, key: str | None) -> EvaluationReply:
    progress = Console(stderr=True)
    try:
        with Swarm(server, key, retry_budget_s=10.0) as swarm, progress.status("starting") as status:
            return swarm.evaluate(
                request,
                poll_s=0.5,
                on_progress=lambda r: status.update(f"{r.num_finished} of {r.num_expected} episodes"),
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {server} goes on with the evaluation, and records its result", err=True)
        raise typer.Exit(INTERRUPTED) from None


# --- an environment ---------------------------------------------------------------------------


def environment_config(
    environment: str,
    options: Mapping[str, Any],
    *,
    model: str | None = None,
    preset: bool = False,
    over: Sequence[str] = (),
) -> Config:
    """Frozen policies as the environment's preset names them, its tasks and its agent; ``model`` is that of all.

    ``preset`` also takes the preset's options and context, which are those of a tiny model.  Raises SetupError.
    """
    from wingbeat.environments.presets import preset_config

    known = preset_config(environment)
    policies: dict[str, Any] = {}
    for name, policy in known.policies.items():
        policies[name] = {
            "model": model or policy.model,
            "context_tokens": policy.context_tokens if preset and not _is_other(model, policy) else _context(model),
            "dtype": policy.dtype,
            "trainable": False,
        }
    data = {
        "run": {"name": "eval"},
        "server": {"port": 0},
        "engine": known.engine.model_dump(mode="json", exclude_defaults=True),
        "policies": policies,
        "tasks": {"environment": environment, "options": {**(known.tasks.options if preset else {}), **options}},
        "agent": {"path": BUILTIN_AGENT, "label": BUILTIN_AGENT},
    }
    check_options(over)
    return validate_config(apply_overrides(data, parse_overrides(over)))


def _is_other(model: str | None, policy: PolicyConfig) -> bool:
    """Whether it is another built-in one than the preset's, and has a context of its own."""
    return model is not None and model.startswith(BUILTIN) and model != policy.model


def _context(model: str | None) -> int:
    """What a model is given that is not the preset's; all that a built-in one has."""
    from wingbeat.environments.tiny_recipes import longest

    if model is None or not model.startswith(BUILTIN):
        return CONTEXT_TOKENS
    return longest(model.removeprefix(BUILTIN))


def _check_positions(config: Config, model: str, environment: str) -> None:
    """Raises SetupError for a folder of a model with fewer positions than it is given, as tiny ones have."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        return
    positions = positions_of(folder)
    for name, policy in config.policies.items():
        if positions is not None and policy.context_tokens > positions:
            raise SetupError(
                f"{model} has only {positions} positions, and is given a context of {policy.context_tokens} tokens. If"
                f" it was trained with the preset of {environment} (`wingbeat init --environment`), add --preset: its"
                f" context, and its options, which say how the tasks look. Else --policies.{name}.context_tokens="
                f"{positions} or less"
            )


def _placed(config: Config, *, concurrency: int, directory: Path | None) -> Config:
    run = config.run if directory is None else config.run.model_copy(update={"dir": str(directory)})
    return config.model_copy(update={"run": run, "agent": config.agent.model_copy(update={"concurrency": concurrency})})


def _on_environment(
    config: Config, request: EvaluationRequest, *, server: str | None, key: str | None, keep: bool
) -> tuple[EvaluationReply, Path | None]:
    from wingbeat.cli.doctor import require_server
    from wingbeat.deploy.evaluating import EvaluationPlan, run_evaluation

    require_server("openai")
    if server is None:
        policy = request.policy or next(iter(config.policies))
        if policy not in config.policies:
            raise SetupError(f"--policy: expected one of {', '.join(config.policies)}, got {policy!r}")
        request = request.model_copy(update={"policy": policy})
    console = Console(stderr=True)
    with console.status("starting") as status:
        plan = EvaluationPlan(
            config,
            Path.cwd(),
            request,
            server=server,
            key=key,
            keep=keep,
            on_note=lambda text: console.print(text, soft_wrap=True, highlight=False, markup=False),
            on_progress=lambda reply: status.update(f"{reply.num_finished} of {reply.num_expected} episodes"),
        )
        outcome = run_evaluation(plan)
    if outcome.reply is None:
        kept = "" if outcome.run_dir is None else f"; run directory: {outcome.run_dir}"
        typer.echo(f"interrupted, and nothing is scored ({outcome.shown}){kept}", err=True)
        raise typer.Exit(INTERRUPTED)
    return outcome.reply, outcome.run_dir


# --- what is shown ----------------------------------------------------------------------------


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
