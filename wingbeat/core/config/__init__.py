"""Configuration: one pydantic schema per subsystem, read from TOML, overridable as ``--a.b=c``."""

from wingbeat.core.config.collect import CollectConfig
from wingbeat.core.config.dataflow import DataflowConfig, OperatorConfig, SourceConfig, TasksConfig
from wingbeat.core.config.engine import EngineConfig
from wingbeat.core.config.health import HealthConfig
from wingbeat.core.config.load import (
    apply_overrides,
    dump_tables,
    dump_toml,
    dump_value,
    load_config,
    parse_overrides,
    parse_value,
    validate_config,
)
from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.config.schema import (
    BUILTIN_AGENT,
    AgentConfig,
    Config,
    EvalConfig,
    PolicyConfig,
    RunConfig,
    SamplingConfig,
)
from wingbeat.core.config.server import ServerConfig
from wingbeat.core.config.trainer import CriticConfig, LoraConfig, TrainerConfig
from wingbeat.core.config.vllm import VllmConfig
from wingbeat.core.config.weights import WeightsConfig

__all__ = [
    "BUILTIN_AGENT",
    "AgentConfig",
    "CollectConfig",
    "Config",
    "CriticConfig",
    "DataflowConfig",
    "EngineConfig",
    "EvalConfig",
    "HealthConfig",
    "LoraConfig",
    "OperatorConfig",
    "PolicyConfig",
    "ResourcesConfig",
    "RunConfig",
    "SamplingConfig",
    "ServerConfig",
    "SourceConfig",
    "TasksConfig",
    "TrainerConfig",
    "VllmConfig",
    "WeightsConfig",
    "apply_overrides",
    "dump_tables",
    "dump_toml",
    "dump_value",
    "load_config",
    "parse_overrides",
    "parse_value",
    "validate_config",
]
