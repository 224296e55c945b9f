"""Models, loads and FLOPs of the accelerator benchmark."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.engines.embedded.engine import resolve_device

POLICY = "policy"
CONTEXT_TOKENS = 16384
PEAK_TFLOPS: dict[str, float] = {
    **{"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312},
    **{"L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A10": 125, "RTX 4090": 165, "RTX 3090": 71},
    **{"MI325X": 1307, "MI300X": 1307, "MI250X": 383},
}
"""Dense bfloat16 with float32 accumulation, from the vendors' data sheets; the first that the device's name has."""
KV_SHARE = 0.4
"""Of the device's free memory at most, for the engine's KV."""
ROW_TOKENS = 1024
"""Of KV that a request of the engine takes, headroom and rounding included."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen 3 with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936

    @property
    def body_weights(self) -> int:
        """Of the layers, which every token passes."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    def attention_flops(self, *, pairs: float) -> float:
        """Forward, of so many (query, key) pairs: a product for the scores and one for the values."""
        return 4.0 * self.layers * self.heads * self.head_dim * pairs

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
            max_position_embeddings=CONTEXT_TOKENS,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How much of everything."""

    requests: int = 256
    """At once in the engine, where its memory holds so many."""
    prompt_tokens: int = 256
    sampled_tokens: int = 256
    rows: int = 16
    row_tokens: int = 2048
    """Of the trainer; a quarter of each is prompt."""
    tree_prompt_tokens: int = 2048
    tree_reply_tokens: int = 256
    group_size: int = 8
    step_groups: int = 8
    step_tokens: int = 128
    """Of prompt and of reply."""
    rounds: int = 2
    """Measured, after one that is not."""


SHAPES: dict[str, tuple[Shape, Load]] = {
    "tiny": (
        Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=512),
        Load(4, 16, 16, 4, 64, 64, 16, group_size=4, step_groups=2, step_tokens=16, rounds=1),
    ),
    "qwen3-0.6b": (Shape(hidden=1024, intermediate=3072), Load()),
    "qwen3-1.7b": (Shape(hidden=2048, intermediate=6144), Load()),
}


def accelerator() -> torch.device:
    return resolve_device("auto")


def device_name() -> str:
    device = accelerator()
    if device.type == "cpu":
        return "cpu"
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type


def fitting_requests(shape: Shape, *, wanted: int) -> int:
    """How many requests the engine's KV may hold on this device."""
    if accelerator().type == "cpu":
        return wanted
    free, _ = memory_info()
    return max(1, min(wanted, int(KV_SHARE * free) // (shape.kv_bytes * ROW_TOKENS)))


def memory_info() -> tuple[int, int]:
    """Bytes of the device that are free, and all."""
    module: Any = torch.get_device_module(accelerator())
    return module.mem_get_info() if hasattr(module, "mem_get_info") else torch.accelerator.get_memory_info()


def peak_tflops(name: str) -> float | None:
    """Of a device by its name; None for one that is not known, or for a part of one."""
    if "MIG" in name:
        return None
    return next((peak for known, peak in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)


def mfu(flops: float, *, seconds: float) -> dict[str, float]:
    """The share of the device's peak, under ``mfu``; nothing where the peak is not known."""
    peak = peak_tflops(device_name())
    achieved = flops / seconds / 1e12
    return {"tflops": round(achieved, 3)} | ({} if peak is None else {"mfu": round(achieved / peak, 4)})


def build(shape: Shape, folder: Path) -> int:
    """Write a model with random weights, and a tokenizer that nobody asks; its number of weights."""
    torch.manual_seed(0)
    with accelerator():
        model: Any = Qwen3ForCausalLM(shape.config())
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    return sum(parameter.numel() for parameter in model.parameters())


def random_ids(count: int, *, vocabulary: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, vocabulary, count).tolist()


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and what was sampled after it."""

    tokens: Sequence[int]
    prompt_tokens: int
    reward: float
    group: int
    logprobs: Sequence[float] = ()
    """Of the sampled tokens; none stands for those of a model that knows nothing."""
    version: int = 0


def make_batch(rows: Sequence[Row], *, step: int, vocabulary: int) -> TrainingBatch:
    return TrainingBatch(
        batch_id=f"{POLICY}-{step}",
        policy=POLICY,
        step=step,
        episodes=tuple(_episode(row, name=f"{step}-{index}", vocabulary=vocabulary) for index, row in enumerate(rows)),
        seed=step,
    )


def _episode(row: Row, *, name: str, vocabulary: int) -> EpisodeSamples:
    sampled = np.arange(len(row.tokens)) >= row.prompt_tokens
    logprobs = np.zeros(len(row.tokens))
    logprobs[row.prompt_tokens :] = row.logprobs or -math.log(vocabulary)
    sample = TrainingSample.build(
        name,
        token_ids=np.array(row.tokens, np.int32),
        sampled=sampled.astype(np.uint8),
        sampling_logprobs=logprobs.astype(np.float32),
        versions=np.where(sampled, row.version, -1).astype(np.int32),
    )
    return EpisodeSamples(name, 1, f"{name.partition('-')[0]}-{row.group}", POLICY, "", row.reward, (sample,))
