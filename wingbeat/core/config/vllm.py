"""Configuration of vLLM servers, and what contradicts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from wingbeat.core.config.lora_groups import group_of
from wingbeat.core.config.section import Section

if TYPE_CHECKING:
    from wingbeat.core.config.schema import Config

SET_BY_US = frozenset(
    {
        "--model",
        "--served-model-name",
        "--uds",
        "--host",
        "--port",
        "--dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--kv-cache-memory-bytes",
        "--gpu-memory-utilization",
        "--num-gpu-blocks-override",
        "--logprobs-mode",
        "--max-logprobs",
        "--generation-config",
        "--worker-extension-cls",
        "--structured-outputs-config",
        "--tensor-parallel-size",
        "--seed",
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        "--enable-lora",
        "--max-loras",
        "--max-cpu-loras",
        "--max-lora-rank",
        "--return-sampling-mask",
        "--speculative-config",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "--reasoning-parser",
        "--config",
        "--api-key",
        "--api-server-count",
        "--data-parallel-size",
        "--headless",
        "-asc",
        "-dp",
        "-sc",
        "-tp",
    }
)
"""Arguments that follow from other keys, would change what a token's logprob and version mean, or of which Wingbeat
would not know."""
MAX_RANK = 512
"""Of the adapters that vLLM serves."""


class VllmConfig(Section):
    """Of `engine.backend = "vllm"`: how an engine worker runs its vLLM servers, or which one it uses.

    One server serves one policy, or all policies of a `lora.group`.
    """

    python: str | None = Field(
        default=None,
        description="The Python interpreter of an environment that has vLLM; unset: the one that runs the worker.",
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="A running server to use in place of an own one, started as `docs/howto/vllm.md` says. For one"
        " engine and the policies of one server.",
    )
    args: list[str] = Field(
        default=[],
        description="More arguments for each server, as `--max-num-partial-prefills=2`. Those that follow from other"
        " keys, or would change what logprobs mean, are refused.",
    )
    start_timeout_s: float = Field(default=900.0, gt=0, description="Seconds within which a server must have started.")
    stall_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds of silence after which a server that has requests counts as hung and is started again.",
    )
    pinned: Literal["embedded", "server"] = Field(
        default="embedded",
        description="Where versions of fully trained policies are kept for evaluation beside the live one: on the"
        " embedded engine in the worker, or on another vLLM server. LoRA policies keep another adapter instead.",
    )

    @field_validator("args")
    @classmethod
    def _args_are_free(cls, args: list[str]) -> list[str]:
        for argument in args:
            if _is_ours(argument):
                name = argument.partition("=")[0].replace("_", "-")
                raise ValueError(
                    f"{name} is set by Wingbeat: sizes follow from `engine` and the policies, the rest must be as it is"
                )
        return args


def _is_ours(argument: str) -> bool:
    """vLLM also takes negations (--no-X), parts of a value (--X.part), and names that are cut off where it is clear."""
    name = argument.partition("=")[0].partition(".")[0].replace("_", "-").replace("--no-", "--", 1)
    is_long = name.startswith("--") and name != "--"
    return name in SET_BY_US or (is_long and any(ours.startswith(name) for ours in SET_BY_US))


def servers_of(config: Config) -> dict[str, list[str]]:
    """The policies of each vLLM server of an engine, by what they have in common."""
    found: dict[str, list[str]] = {}
    for name, policy in config.policies.items():
        group = group_of(policy)
        found.setdefault(f"policies.{name}" if group is None else f"lora.group = {group!r}", []).append(name)
    return found


def check_vllm(config: Config) -> None:
    """Raises ValueError where policies cannot be served as ``engine.vllm`` says."""
    if config.engine.backend != "vllm":
        return
    servers = servers_of(config)
    if config.engine.vllm.url is not None and len(servers) > 1:
        raise ValueError(
            f"engine.vllm.url names one server, and these policies need {len(servers)} ({', '.join(servers)}): leave it"
            " out, or share a base model by `lora.group`"
        )
    for name, policy in config.policies.items():
        if policy.lora is not None and policy.lora.rank > MAX_RANK:
            raise ValueError(
                f"policies.{name}.lora.rank: vLLM serves adapters up to rank {MAX_RANK}, got {policy.lora.rank}"
            )
