"""Options with which commands find a server; the environment can hold them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.client.plans import AUTO
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import KEY_VARIABLE
from wingbeat.core.tls import CA_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8321"
SDK_CA_VARIABLE = "SSL_CERT_FILE"
"""Where the SDKs that agents use look for certificates (httpx, aiohttp and OpenSSL itself do)."""

ServerOption = Annotated[
    str, typer.Option("--server", "--url", envvar="WINGBEAT_URL", help="The server's URL, as `serve` prints it.")
]
ServersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        "--url",
        envvar="WINGBEAT_URL",
        help=f"The server's URL, as `serve` prints it; unset: {DEFAULT_URL}. Several servers of one team, the leading"
        " one first: NAME=URL (repeatable).",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="A client or admin key, if the server asks for one (better: the env).",
    ),
]

AdminKeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="An admin key, if the server asks for one (better: the env).",
    ),
]

JournalOption = Annotated[
    Path | None,
    typer.Option(help="With several servers: a folder that lets a successor end what a killed client left."),
]
ResourcesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="A resources server to lease from (repeatable), or auto: those that report to the server. Unset: this"
        " machine's own.",
    ),
]

NAMED = re.compile(r"([A-Za-z0-9_-]+)=(https?://.+)")


def named_servers(given: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """A server's URL, or the servers of a team by name (of one of both, the other is empty).

    Raises SetupError for a mixture, or a name that comes twice.
    """
    if not given:
        return DEFAULT_URL, {}
    found = [NAMED.fullmatch(text) for text in given]
    if len(given) == 1 and found[0] is None:
        return given[0], {}
    servers = {match[1]: match[2] for match in found if match is not None}
    if len(servers) < len(given):
        raise SetupError(f"--server: expected one URL, or several different NAME=URL, got {', '.join(given)}")
    return "", servers


def certificates_hints(urls: Iterable[str]) -> tuple[str, ...]:
    """What to say where Wingbeat's own calls trust a certificate and those of the agent's SDK probably do not."""
    if not any(url.startswith("https://") for url in urls):
        return ()
    if not os.environ.get(CA_VARIABLE) or os.environ.get(SDK_CA_VARIABLE):
        return ()
    return (
        f"{CA_VARIABLE} is set and {SDK_CA_VARIABLE} is not: model calls are made by the agent's own SDK, and most"
        f' read {SDK_CA_VARIABLE}; without it they may refuse the server\'s certificate ("Connection error")',
    )


def keys_by_server(names: Iterable[str]) -> dict[str, str]:
    """Of the servers of a team that have keys of their own: WINGBEAT_KEY_EAST is that of ``east``."""
    variables = {name: f"{KEY_VARIABLE}_{name.upper().replace('-', '_')}" for name in names}
    return {name: os.environ[variable] for name, variable in variables.items() if os.environ.get(variable)}


def resource_servers(given: Iterable[str] | None) -> tuple[str, ...]:
    """Addresses of resources servers, or ``auto``.  Raises SetupError."""
    found = tuple(dict.fromkeys(given or ()))
    wrong = [text for text in found if text != AUTO and re.match(r"https?://.", text) is None]
    if wrong:
        raise SetupError(f"--resources: expected http://HOST:PORT, https://HOST:PORT or {AUTO}, got {wrong[0]!r}")
    return found
