"""``wingbeat engine``: add this machine's compute to a running server."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.cli.connection import DEFAULT_URL, ServerOption
from wingbeat.cli.doctor import require_server
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import WORKER_KEY_VARIABLE, without_keys
from wingbeat.core.tls import CA_VARIABLE, client_context
from wingbeat.deploy.devices import usable_cores

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def engine(
    server: ServerOption = DEFAULT_URL,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            envvar=WORKER_KEY_VARIABLE,
            show_envvar=True,
            help="A worker key, from `wingbeat keys create worker` (better: the env).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the server calls this engine; unset: the machine's name and a number.")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help="Serve only these policies; unset: all of the server.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A torch device, or auto; unset: what the server's engine.device says.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads of each process; unset: this machine's cores, divided.")
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Processes (devices) that share each model's weights.")
    ] = 1,
    relay: Annotated[
        str,
        typer.Option(metavar="[HOST:]PORT", help="Pass weights on to other engines, which reach this machine there."),
    ] = "",
    ca: Annotated[
        Path | None, typer.Option(help=f"A PEM file that vouches for the server; unset: {CA_VARIABLE}, or the system.")
    ] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds that running generations get when this engine is told to end.")
    ] = 60.0,
) -> None:
    """Generate for a server on another machine (or this one): joins, catches up, serves, leaves without a loss.

    Comes back by itself where the server is away for up to two minutes. Ctrl-C or SIGTERM: takes no more, ends what it
    has within --drain-s, and hands the rest over; a second one ends it at once.
    """
    require_server("torch", "transformers")
    if not key:
        raise SetupError(
            f"an engine needs a worker key: `wingbeat keys create worker` on the server's machine makes one; pass it in"
            f" {WORKER_KEY_VARIABLE} (or --key)"
        )
    if not re.match(r"https?://", server):
        raise SetupError(f"--server: expected http://HOST:PORT or https://HOST:PORT, got {server!r}")
    name = name or f"{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())}-{os.getpid()}"
    if NAME.fullmatch(name) is None:
        raise SetupError(f"--name: expected letters, digits, '.', '_' and '-', at most 100, got {name!r}")
    if server.startswith("https://"):
        client_context(ca)  # refuses a file that is no certificate, before torch is loaded
    elif ca is not None:
        raise SetupError(f"--ca is of https, and --server is {server}")
    num_threads = str(threads or max(1, usable_cores() // tensor_parallel))
    environment = without_keys(os.environ) | {
        WORKER_KEY_VARIABLE: key,
        "OMP_NUM_THREADS": num_threads,
        "TOKENIZERS_PARALLELISM": "false",
        **({CA_VARIABLE: str(ca.absolute())} if ca is not None else {}),
    }
    command = [sys.executable, "-m", "wingbeat.workers", "engine", "--url", server.rstrip("/"), "--worker-id", name]
    command += ["--threads", num_threads, "--tensor-parallel", str(tensor_parallel), "--drain-s", str(drain_s)]
    command += ["--policies", policies] if policies else []
    command += ["--device", device] if device else []
    command += ["--relay", relay] if relay else []
    os.execve(sys.executable, command, environment)  # signals come straight to it, and nothing of us is left
