"""Configuration of the engine workers, whatever engine they host."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from wingbeat.core.config.section import Section
from wingbeat.core.config.vllm import VllmConfig


class EngineConfig(Section):
    """Engine workers."""

    backend: Literal["embedded", "vllm"] = Field(
        default="embedded", description="What generates: the embedded engine, or vLLM servers."
    )
    count: int = Field(default=1, ge=0, description="Engine processes; each hosts every policy.")
    threads: int | None = Field(default=None, ge=1, description="Torch threads; unset: cores / workers.")
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Processes, with a device each, that share every model of an engine: for models that one device"
        " does not hold, or not fast enough. It must divide the model's attention heads.",
    )
    device: str = Field(
        default="auto",
        description="`auto` (torch.accelerator, else cpu) or a torch device. vLLM finds its own.",
    )
    max_running: int = Field(default=64, ge=1, description="Requests decoded together, per policy or `lora.group`.")
    kv_tokens: int = Field(
        default=131072, ge=64, description="KV cache capacity in tokens, per policy or `lora.group`."
    )
    prefill_tokens: int = Field(default=2048, ge=16, description="Prompt tokens per step at most.")
    kv_on_update: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="After new weights: recompute the KV of running requests (exact), or keep it (faster).",
    )
    move_kv_bytes: int = Field(
        default=64 * 2**20,
        ge=0,
        le=2**29,
        description="A generation that moves to another engine takes its KV along up to so many bytes; what is more"
        " is computed again there.",
    )
    max_lag: int | None = Field(
        default=None,
        ge=0,
        description="An engine whose weights are more versions behind those of the freshest engine gets no generations"
        " until it has caught up. Unset: `dataflow.max_staleness` - 1, and 0 at least (docs/staleness.md).",
    )
    version_mismatch: Literal["warn", "refuse"] = Field(
        default="warn",
        description="Of an engine or trainer that runs another release (major or minor) of Wingbeat or torch than the"
        " server.",
    )
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _kv_moves_have_an_effect(self) -> EngineConfig:
        if self.backend == "vllm" and self.move_kv_bytes != type(self).model_fields["move_kv_bytes"].default:
            raise ValueError(
                '`move_kv_bytes` is of the embedded engine: with `backend = "vllm"` generations move by their tokens;'
                " leave it out"
            )
        return self

    @model_validator(mode="after")
    def _vllm_keys_have_an_effect(self) -> EngineConfig:
        """A key that would change nothing is a misunderstanding: refuse it."""
        defaults, vllm = VllmConfig(), self.vllm
        changed = [key for key in VllmConfig.model_fields if getattr(vllm, key) != getattr(defaults, key)]
        if self.backend != "vllm":
            if changed:
                raise ValueError(
                    f'`vllm.{changed[0]}` is of `backend = "vllm"`, and `backend` is {self.backend!r}: set it, or'
                    " leave the key out"
                )
            return self
        if self.device != "auto":
            raise ValueError(
                f'`device` is of the embedded engine, got {self.device!r} with `backend = "vllm"`: choose the'
                " devices of vLLM by CUDA_VISIBLE_DEVICES"
            )
        if vllm.url is not None:
            of_own = [key for key in changed if key in ("python", "args", "pinned")]
            if of_own:
                raise ValueError(f"`vllm.{of_own[0]}` is of own servers, and `vllm.url` names a running one: set one")
            if self.tensor_parallel > 1:
                raise ValueError(
                    "`tensor_parallel` is of own servers: start the one that `vllm.url` names with"
                    f" --tensor-parallel-size {self.tensor_parallel}, and leave the key out"
                )
            if self.count > 1:
                raise ValueError(
                    f"`vllm.url` names one server, which serves one engine: set `count` to 1, got {self.count}"
                )
        return self
