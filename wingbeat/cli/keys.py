"""``wingbeat keys``: who may call a server.  On its key file, or on a running server over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import TypeAdapter
from rich.table import Table

from wingbeat.cli.arguments import CONFIG_FILE
from wingbeat.cli.terminal import PlainConsole
from wingbeat.client.retry import RetryPolicy
from wingbeat.client.transport import Call, Transport
from wingbeat.core.config import RunConfig, ServerConfig
from wingbeat.core.config.lending import load_lending
from wingbeat.core.errors import RequestError
from wingbeat.core.key_protocol import KeyReply, NewKeyReply
from wingbeat.core.keys import KEY_VARIABLE, WORKER_KEY_VARIABLE
from wingbeat.server.keys.file import KeyFile, NewKey, key_file_path
from wingbeat.server.keys.principals import Role

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
TIMEOUT_S = 30.0
R = TypeVar("R")

keys = typer.Typer(
    name="keys",
    help="Make, list and revoke the keys with which people, agents and workers call a server.",
    no_args_is_help=True,
)

FileOption = Annotated[Path | None, typer.Option("--file", help="The key file; unset: the configuration's.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Says where the key file is; unset: ./config.toml if there is one.")
]
ServerOption = Annotated[
    str | None, typer.Option("--server", help="Ask a running server at this URL (as admin) in place of the file.")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar=KEY_VARIABLE, show_envvar=True, help="With --server: an admin key (better: the env)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@keys.command()
def create(
    role: Annotated[Role, typer.Argument(help="What the key may do (docs/security.md).")],
    name: Annotated[str, typer.Option(help="For people: who or what has the key.")] = "",
    expires: Annotated[str | None, typer.Option(help="When it ends, as 12h, 30d or 8w; unset: never.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Role collect: its conversations may train.")] = False,
    no_record: Annotated[bool, typer.Option("--no-record", help="Role collect: keep no conversations.")] = False,
    policy: Annotated[list[str] | None, typer.Option(help="Role collect: may call only this (repeatable).")] = None,
    file: FileOption = None,
    config: ConfigOption = None,
    server: ServerOption = None,
    key: KeyOption = None,
    json_output: JsonOption = False,
) -> None:
    """Make a key and print it, this once. Only its SHA-256 is kept; a running server takes it within a second."""
    wanted = NewKey(
        role,
        name=name,
        expires_s=None if expires is None else parse_duration(expires),
        train=train,
        record=not no_record,
        policies=tuple(policy or ()),
    )
    if server is not None:
        call = Call("POST", "/api/keys", body=wanted.request(), repeatable=False)
        made = _ask(server, key, call, TypeAdapter(NewKeyReply))
    else:
        record, secret = _file(file, config).create(wanted)
        made = NewKeyReply(**record.reply(time.time()).model_dump(), key=secret)
    if json_output:
        typer.echo(made.model_dump_json())
        return
    variable = WORKER_KEY_VARIABLE if role is Role.WORKER else KEY_VARIABLE
    typer.echo(f"{_title(made)}; it is not shown again. Programs read it from {variable}:", err=True)
    typer.echo(made.key)


@keys.command("list")
def list_keys(
    file: FileOption = None,
    config: ConfigOption = None,
    server: ServerOption = None,
    key: KeyOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show all keys, without the keys themselves."""
    if server is not None:
        found = _ask(server, key, Call("GET", "/api/keys"), TypeAdapter(list[KeyReply]))
    else:
        found = [record.reply(time.time()) for record in _file(file, config).read()]
    if json_output:
        typer.echo(json.dumps([one.model_dump() for one in found]))
        return
    if not found:
        typer.echo("no keys; `wingbeat keys create admin` makes one", err=True)
        return
    PlainConsole().print(_table(found))


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `wingbeat keys list` shows it.")],
    file: FileOption = None,
    config: ConfigOption = None,
    server: ServerOption = None,
    key: KeyOption = None,
    json_output: JsonOption = False,
) -> None:
    """Refuse a key from now on. A running server heeds it within a second, and ends the links of its workers."""
    if server is not None:
        if not re.fullmatch(r"[\w-]+", key_id):
            raise RequestError(f"expected the id of a key, as `wingbeat keys list` shows it, got {key_id!r}")
        gone = _ask(server, key, Call("DELETE", f"/api/keys/{key_id}"), TypeAdapter(KeyReply))
    else:
        gone = _file(file, config).revoke(key_id).reply(time.time())
    typer.echo(gone.model_dump_json() if json_output else f"revoked {_title(gone)}")


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``45m``, ``12h``, ``30d`` or ``8w``.  Raises RequestError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", text.strip())
    if found is None or not float(found[1]):
        raise RequestError(f"expected a time such as 45m, 12h, 30d or 8w, got {text!r}", param="expires")
    return float(found[1]) * UNITS[found[2]]


def _file(file: Path | None, config: Path | None) -> KeyFile:
    """The key file of the command line, else of the configuration, else of the default one."""
    if file is not None:
        return KeyFile(file.expanduser())
    path = config or (CONFIG_FILE if CONFIG_FILE.is_file() else None)
    if path is None:
        run, server, folder = RunConfig(), ServerConfig(), Path.cwd()
    else:
        loaded = load_lending(path)  # also the file of a resources server alone
        run, server, folder = loaded.run, loaded.server, path.absolute().parent
    return KeyFile(key_file_path(server.keys_file, runs=Path(run.dir).expanduser(), folder=folder))


def _ask(url: str, key: str | None, call: Call, reply: TypeAdapter[R]) -> R:
    """One call of a server."""

    async def ask() -> bytes:
        transport = Transport(url, key=key, timeout_s=TIMEOUT_S, retry=RetryPolicy(budget_s=TIMEOUT_S))
        try:
            return await transport.send_unread(call)
        finally:
            await transport.close()

    return reply.validate_json(asyncio.run(ask()), extra="ignore")


def _title(key: KeyReply) -> str:
    named = f" ({key.name})" if key.name else ""
    until = "" if key.expires_s is None else f", valid until {_date(key.expires_s)}"
    return f"{key.id}: {key.role} key{named}{until}"


def _date(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _table(found: Sequence[KeyReply]) -> Table:
    table = Table()
    for column in ("id", "role", "name", "state", "created", "expires"):
        table.add_column(column, overflow="fold", no_wrap=column == "id")  # an id is to be copied
    for one in found:
        options = [*(["train"] if one.train else []), *([] if one.record else ["no record"]), *one.policies]
        role = f"{one.role}: {', '.join(options)}" if options else one.role
        created = _date(one.created_s).partition(" ")[0]  # six columns and no more, for a terminal of 80
        table.add_row(one.id, role, one.name, one.state, created, _date(one.expires_s))
    return table
