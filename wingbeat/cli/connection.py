"""Options with which commands find a server; the environment can hold them."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8321"

ServerOption = Annotated[
    str, typer.Option("--server", "--url", envvar="WINGBEAT_URL", help="The server's URL, as `serve` prints it.")
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="WINGBEAT_KEY", show_envvar=True, help="The admin key, if the server has one (better: the env)."
    ),
]
