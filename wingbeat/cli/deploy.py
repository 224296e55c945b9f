"""``wingbeat deploy`` and ``wingbeat scale``: a server's processes on other machines, and more or fewer of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from wingbeat.cli.connection import DEFAULT_URL, AdminKeyOption, ServerOption
from wingbeat.cli.run import (
    ConfigArguments,
    DryRunOption,
    ResumeOption,
    checked_config,
    run_serve,
    run_train,
    show_config,
)
from wingbeat.client import Swarm
from wingbeat.core.deployment import MAX_ENGINES
from wingbeat.core.errors import SetupError

if TYPE_CHECKING:
    from wingbeat.core.config import Config
    from wingbeat.deploy.local import MakePlace
    from wingbeat.deploy.processes import Place

deploy = typer.Typer(name="deploy", no_args_is_help=True)


@deploy.callback()
def deploy_commands() -> None:
    """Run a server's processes on a cluster."""


@deploy.command(name="ray", context_settings={"ignore_unknown_options": True})
def deploy_ray(
    arguments: ConfigArguments = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="The cluster: `auto` is the one of this machine, else HOST:PORT.")
    ] = "auto",
    resume: ResumeOption = None,
    train: Annotated[
        bool, typer.Option("--train", help="Also run the configured tasks and agents here, as `wingbeat train` does.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Serve, or train, with engines, trainers and resources servers on a Ray cluster, and control on this node.

    Run it on a node of the cluster. What dies is started again, elsewhere where its node is gone. `run.dir` must be in
    a folder that all nodes share, as trainers keep their checkpoints there.
    """
    config, config_dir = checked_config(arguments, resume, trains=train)
    if dry_run:
        show_config(config)
        return
    place = _on_ray(address)
    if train:
        run_train(config, config_dir, resume, json_output=False, place=place)
    else:
        run_serve(config, config_dir, resume, place)


def _on_ray(address: str) -> MakePlace:
    try:
        from wingbeat.deploy.ray.cluster import connect
        from wingbeat.deploy.ray.place import RayPlace
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise SetupError(
            "`wingbeat deploy ray` needs Ray; on every node of the cluster, from a clone: pip install '.[server,ray]'"
            " -c constraints.txt"
        ) from error

    def make(config: Config) -> Place:
        connect(address)
        return RayPlace(config)

    return make


def scale(
    engines: Annotated[int, typer.Option(min=0, max=MAX_ENGINES, help="Engines that the server is to run itself.")],
    server: ServerOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Have a running server start more engines, or drain and end some, wherever its processes run."""
    with Swarm(server, key, retry_budget_s=10.0) as swarm:
        reply = swarm.scale(engines=engines)
    typer.echo(f"engines: {reply.engines} wanted, {len(reply.connected)} connected now")
