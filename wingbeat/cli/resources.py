"""``wingbeat resources``: lend this machine's resources to clients on any machine."""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.cli.arguments import CONFIG_FILE, check_options
from wingbeat.cli.doctor import require_server
from wingbeat.core.config.lending import LendingConfig, load_lending
from wingbeat.core.errors import ConfigError, SetupError
from wingbeat.core.keys import (
    ADMIN_KEY_VARIABLE,
    CLIENT_KEY_VARIABLE,
    WORKER_KEY_VARIABLE,
    is_key_variable,
)
from wingbeat.core.lifeline import LENDING_GRACE_S, end_with_supervisor
from wingbeat.core.tls import check_certificate


def resources(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [--SECTION.KEY=VALUE]...",
            help="A file with sections resources and server (else ./config.toml), and settings that override it.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Bind address; unset: resources.host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 takes a free one; unset: resources.port.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="Keys of `wingbeat keys`; unset: server.keys_file, or keys.json in run.dir.")
    ] = None,
    server: Annotated[
        str, typer.Option("--server", "--url", envvar="WINGBEAT_URL", help="A server to report to, which shows it.")
    ] = "",
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            envvar=WORKER_KEY_VARIABLE,
            show_envvar=True,
            help="A worker key (or admin key) of that server (better: the env).",
        ),
    ] = None,
    advertise: Annotated[
        str, typer.Option(metavar="URL", help="How clients reach it, for that server; unset: where it listens.")
    ] = "",
    no_file: Annotated[bool, typer.Option("--no-file", help="Do not read ./config.toml.")] = False,
    address_file: Annotated[
        Path | None, typer.Option(help="Write the address and process id into this file once it serves.")
    ] = None,
) -> None:
    """Pool sandboxes, endpoints and other resources of this machine for many clients (`rollout --resources URL`).

    Ctrl-C or SIGTERM: ends all leases, cleans up, and ends.
    """
    require_server()
    if advertise and re.match(r"https?://[^\s/]", advertise) is None:
        raise SetupError(f"--advertise: expected http://HOST:PORT or https://HOST:PORT, got {advertise!r}")
    config, folder = _config(arguments or [], host=host, port=port, no_file=no_file)
    launch_server(
        config,
        folder,
        key_file=key_file,
        control=server,
        control_key=key,
        advertise=advertise,
        address_file=address_file,
    )


def launch_server(
    config: LendingConfig,
    folder: Path,
    *,
    key_file: Path | None,
    control: str,
    control_key: str | None,
    advertise: str,
    address_file: Path | None,
) -> None:
    """Serve until a signal; ``folder`` is where relative paths of the configuration start."""
    from wingbeat.server.keys.file import key_file_path
    from wingbeat.server.keys.ring import OwnKeys
    from wingbeat.server.resources.serving import LendingLaunch, run_lending

    logging.basicConfig(level=logging.INFO, format="%(asctime)s resources %(levelname)s %(message)s")
    server = config.server
    if server.tls_cert is not None and server.tls_key is not None:
        cert, secret = (folder / Path(path).expanduser() for path in (server.tls_cert, server.tls_key))
        check_certificate(cert, secret)
        server = server.model_copy(update={"tls_cert": str(cert), "tls_key": str(secret)})
    runs = Path(config.run.dir).expanduser().absolute()
    own = OwnKeys(admin=os.environ.get(ADMIN_KEY_VARIABLE), client=os.environ.get(CLIENT_KEY_VARIABLE))
    for name in filter(is_key_variable, tuple(os.environ)):  # nothing that it starts inherits one
        if name not in config.resources.key_variables:
            del os.environ[name]
    end_with_supervisor(grace_s=LENDING_GRACE_S)
    run_lending(
        LendingLaunch(
            resources=config.resources,
            server=server,
            keys_file=key_file or key_file_path(server.keys_file, runs=runs, folder=folder),
            own=own,
            control=control,
            control_key=control_key,
            advertise=advertise,
            address_file=address_file,
            on_ready=lambda url: typer.echo(
                f"lending {', '.join(config.resources.kinds)} at {url}\n"
                f"use it: wingbeat rollout agent.py --resources {advertise or _named(url)}"
            ),
        )
    )


def _named(url: str) -> str:
    """Of a server on all addresses, one that others can call."""
    return re.sub(r"//(0\.0\.0\.0|\[::\]):", f"//{socket.gethostname()}:", url)


def _config(arguments: list[str], *, host: str | None, port: int | None, no_file: bool) -> tuple[LendingConfig, Path]:
    """The configuration and its folder.  Raises ConfigError."""
    check_options(arguments)
    overrides = [argument for argument in arguments if argument.startswith("-")]
    files = [Path(argument) for argument in arguments if not argument.startswith("-")]
    if len(files) > 1:
        raise ConfigError(f"expected one configuration file, got {', '.join(map(str, files))}")
    if not files and not no_file and CONFIG_FILE.is_file():
        files = [CONFIG_FILE]
    overrides += [] if host is None else [f"--resources.host={host}"]
    overrides += [] if port is None else [f"--resources.port={port}"]
    return load_lending(files[0] if files else None, overrides), (files[0].absolute().parent if files else Path.cwd())
