"""Configuration: one pydantic schema per subsystem, read from TOML, overridable as ``--a.b=c``."""

from wingbeat.core.config.load import apply_overrides, dump_toml, load_config, parse_overrides
from wingbeat.core.config.schema import (
    AgentConfig,
    Config,
    DataflowConfig,
    EngineConfig,
    EvalConfig,
    LoraConfig,
    PolicyConfig,
    RunConfig,
    SamplingConfig,
    ServerConfig,
    TasksConfig,
    TrainerConfig,
)

__all__ = [
    "AgentConfig",
    "Config",
    "DataflowConfig",
    "EngineConfig",
    "EvalConfig",
    "LoraConfig",
    "PolicyConfig",
    "RunConfig",
    "SamplingConfig",
    "ServerConfig",
    "TasksConfig",
    "TrainerConfig",
    "apply_overrides",
    "dump_toml",
    "load_config",
    "parse_overrides",
]
