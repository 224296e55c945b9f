"""Local paths of a configuration, made absolute."""

from __future__ import annotations

from pathlib import Path

from wingbeat.core.config import AgentConfig, Config, SourceConfig, TasksConfig, TrainerConfig
from wingbeat.dataflow.operators import absolute_use
from wingbeat.deploy.checks import OTHER_MODELS
from wingbeat.environments.registry import absolute_spec

SERVER_FILES = ("keys_file", "tls_cert", "tls_key")
"""Keys of the server's section that name a file."""


def expanded(path: str | None) -> str | None:
    """With the home folder in place of ``~``."""
    return None if path is None else str(Path(path).expanduser())


def absolute_paths(config: Config, config_dir: Path) -> Config:
    """The same configuration with every local path absolute, so that a run resumes from any folder."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str((config_dir / path).absolute())

    def model(source: str | None) -> str | None:
        return absolute(source) if source is not None and (config_dir / source).exists() else source

    def program(path: str | None) -> str | None:
        return absolute(path) if path is not None and "/" in path else path

    def agent(config: AgentConfig) -> AgentConfig:
        path = config.path if config.is_builtin else absolute(config.path)
        return config.model_copy(update={"path": path, "python": program(config.python)})

    def tasks_of(config: SourceConfig | TasksConfig) -> dict[str, str | None]:
        spec = config.environment
        return {
            "file": absolute(config.file),
            "environment": None if spec is None else absolute_spec(spec, config_dir),
        }

    def trainer(config: TrainerConfig) -> TrainerConfig:
        return config.model_copy(update={key: model(getattr(config, key)) for key in OTHER_MODELS})

    policies = {
        name: policy.model_copy(
            update={
                "model": model(policy.model),
                "chat_template": absolute(policy.chat_template),
                "trainer": trainer(policy.trainer),
            }
        )
        for name, policy in config.policies.items()
    }
    sources = {name: source.model_copy(update=tasks_of(source)) for name, source in config.tasks.sources.items()}
    operators = [o.model_copy(update={"use": absolute_use(o.use, config_dir)}) for o in config.dataflow.operators]
    return config.model_copy(
        update={
            "policies": policies,
            "dataflow": config.dataflow.model_copy(update={"operators": operators}),
            "tasks": config.tasks.model_copy(update={**tasks_of(config.tasks), "sources": sources}),
            "server": config.server.model_copy(
                update={key: absolute(expanded(getattr(config.server, key))) for key in SERVER_FILES}
            ),
            "agent": agent(config.agent),
            "agents": {name: agent(found) for name, found in config.agents.items()},
        }
    )
