"""What is refused before anything of a server is made; light, so that a dry run can ask it too."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from wingbeat.core.config import Config
from wingbeat.core.errors import ConfigError, DependencyMissing, PortInUse

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_exposure(config: Config) -> None:
    """Refuse to listen beyond this machine without a key."""
    if config.server.host not in LOOPBACK and config.server.admin_key is None:
        raise ConfigError(
            f"server.host = {config.server.host!r} is reachable from other machines: set server.admin_key"
            " (16 characters or more), or bind 127.0.0.1"
        )


def check_chains(config: Config, config_dir: Path) -> None:
    """Refuse unknown operators and options, and those that do not fit the run (docs/operators.md).

    Raises ConfigError; DependencyMissing where only the client is installed.
    """
    if not config.dataflow.operators:
        return
    try:
        from wingbeat.dataflow.operators import check_operators
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            f"operators are checked by the server's code, which needs {error.name!r}: pip install 'wingbeat[server]'"
        ) from error
    check_operators(config, config_dir)


def check_port(host: str, port: int) -> None:
    """Refuse a taken port before minutes go into a model; what else may be wrong with it control tells.

    Raises PortInUse.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"port {port} on {host} is in use; stop that process, or pass --server.port=0 for a free one"
                ) from None
