"""What a vLLM server of ours is started with: arguments and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from wingbeat.core.config.vllm import MAX_RANK
from wingbeat.core.errors import ConfigError, ModelSourceError
from wingbeat.core.keys import without_keys

INSIDE = Path(__file__).parent / "inside"
LAUNCHER = INSIDE / "wingbeat_vllm_launch.py"
LIFELINE = "WINGBEAT_VLLM_LIFELINE"
"""As the launcher reads it."""
BASE = "base"
"""The name under which a server offers its model itself."""
MAX_LOGPROBS = 512
"""Most probable tokens that a request may ask for: how large a nucleus can be seen whole."""
KV_SLACK_TOKENS = 512
"""vLLM keeps a block back and gives whole blocks only."""
MEMORY_SHARE = "0.01"
"""vLLM does not start where less than this share of a GPU is free, even if it is told the bytes of its KV; by itself it
asks for nearly all, and others are on the GPU, too."""
RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_RANK)
"""The sizes that vLLM has room for adapters in."""
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server to start."""

    model: Path
    dtype: str
    context_tokens: int
    max_running: int
    kv_tokens: int
    prefill_tokens: int
    threads: int = 1
    tensor_parallel: int = 1
    adapters: int = 0
    """LoRA adapters that requests may use at once; 0: none."""
    adapter_rank: int = 0
    """The highest."""
    seed: int = 0
    python: str = ""
    args: tuple[str, ...] = ()


def command(spec: ServerSpec, *, python: str, socket: Path) -> list[str]:
    """The command line.  Raises ConfigError for a rank beyond vLLM's."""
    return [python, str(LAUNCHER), "--uds", str(socket), *arguments(spec), *spec.args]


def arguments(spec: ServerSpec) -> list[str]:
    """Those for vLLM itself, also of a server that somebody else starts."""
    flags: dict[str, str | int] = {
        "--model": str(spec.model),
        "--served-model-name": BASE,
        "--dtype": spec.dtype,
        "--max-model-len": spec.context_tokens,
        "--max-num-seqs": spec.max_running,
        "--max-num-batched-tokens": spec.prefill_tokens + spec.max_running,
        "--kv-cache-memory-bytes": kv_bytes(spec),
        "--gpu-memory-utilization": MEMORY_SHARE,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": MAX_LOGPROBS,
        "--generation-config": "vllm",
        "--worker-extension-cls": "wingbeat_vllm_worker.WingbeatWorker",
        "--structured-outputs-config": json.dumps({"backend": "guidance"}),
        "--tensor-parallel-size": spec.tensor_parallel,
        "--seed": spec.seed,
    }
    switches = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if spec.adapters:
        flags["--max-loras"] = spec.adapters
        flags["--max-cpu-loras"] = 2 * spec.adapters
        flags["--max-lora-rank"] = _room(spec.adapter_rank)
        switches.append("--enable-lora")
    return [str(part) for pair in flags.items() for part in pair] + switches


def environment(spec: ServerSpec, *, sockets: Path) -> dict[str, str]:
    """Ours without keys, with what vLLM reads: nothing is reported or downloaded, threads are what they are set to.

    ``sockets`` is a folder for those of its processes.
    """
    chosen = {
        **without_keys(os.environ),
        LIFELINE: "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if spec.adapters else "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(spec.threads),
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("PYTHONPATH", "VLLM_API_KEY"):  # of another interpreter; which we would have to send
        chosen.pop(name, None)
    return chosen


def kv_bytes(spec: ServerSpec) -> int:
    """KV of ``kv_tokens`` on each device, by the model's configuration.

    Models whose layers keep less per token (sliding windows, latent attention) get room for more tokens.
    Raises ModelSourceError where the configuration says too little.
    """
    try:
        config: Any = AutoConfig.from_pretrained(spec.model, local_files_only=True).get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        layers = config.num_hidden_layers
    except (AttributeError, OSError, ValueError) as error:
        raise ModelSourceError(
            f"expected the sizes of the attention in {spec.model}/config.json, got: {error}"
        ) from error
    per_token = 2 * layers * -(-kv_heads // spec.tensor_parallel) * size * DTYPE_BYTES[spec.dtype]
    return per_token * (spec.kv_tokens + KV_SLACK_TOKENS)


def _room(rank: int) -> int:
    for size in RANKS:
        if rank <= size:
            return size
    raise ConfigError(f"vLLM serves LoRA adapters up to rank {MAX_RANK}, got {rank}: lower `lora.rank`", param="rank")
