"""Across the border: what the engine says a token's logprob was is what the trainer computes for it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from wingbeat.core.config.schema import LoraConfig, PolicyConfig, TrainerConfig
from wingbeat.core.ports import GenerateRequest
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.types import SamplingParams
from wingbeat.core.worker_protocol import AdapterInfo
from wingbeat.engines.embedded import AdapterMerger, EmbeddedEngine, EngineOptions
from wingbeat.trainer.models import load_model
from wingbeat.trainer.single import PolicyTrainer

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.15,
}
GEMMA = {"sliding_window": 16, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8}
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, **GEMMA, layer_types=["sliding_attention", "full_attention"])
    ),
}


def save_model(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    FAMILIES[kind]().save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def sampled_batch(engine: EmbeddedEngine, *, step: int, temperature: float) -> TrainingBatch:
    """Two groups of three episodes of two turns, as the engine samples them, with unequal rewards."""
    rng = np.random.default_rng(step)
    prompts = [rng.integers(0, VOCABULARY, 5 + 4 * index).astype(np.int32) for index in range(6)]
    drawn: list[list[tuple[Any, list[int], list[float], list[int]]]] = [[] for _ in prompts]
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=8 + index, temperature=temperature)
            engine.submit(GenerateRequest(f"{step}.{turn}.{index}", prompt.tolist(), params, f"e{index}"))
        found: dict[int, tuple[list[int], list[float], list[int]]] = {i: ([], [], []) for i in range(len(prompts))}
        while engine.has_work():
            for event in engine.step():
                tokens, logprobs, versions = found[int(event.request_id.rpartition(".")[2])]
                tokens.extend(event.token_ids)
                logprobs.extend(event.logprobs)
                versions.extend([event.policy_version] * len(event.token_ids))
        for index, (tokens, logprobs, versions) in found.items():
            drawn[index].append((prompts[index], tokens, logprobs, versions))
            prompts[index] = np.concatenate([prompts[index], tokens, rng.integers(0, VOCABULARY, 3)]).astype(np.int32)
    episodes = tuple(_episode(index, turns, temperature) for index, turns in enumerate(drawn))
    return TrainingBatch(batch_id=f"b{step}", policy="p", step=step, episodes=episodes, seed=step)


def _episode(index: int, turns: list[Any], temperature: float) -> EpisodeSamples:
    ids = np.concatenate([turns[-1][0], turns[-1][1]]).astype(np.int32)
    sampled, logprobs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for prompt, tokens, drawn, under in turns:
        own = slice(len(prompt), len(prompt) + len(tokens))
        sampled[own], logprobs[own], versions[own] = 1, drawn, under
    sample = TrainingSample.build(
        f"s{index}",
        token_ids=ids,
        sampled=sampled,
        sampling_logprobs=logprobs,
        versions=versions,
        temperature=temperature,
    )
    return EpisodeSamples(
        episode_id=f"e{index}",
        attempt=1,
        group_id=f"g{index // 3}",
        policy="p",
        agent="",
        reward=float(index % 3),
        samples=(sample,),
    )


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=12.0)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", list(FAMILIES))
def test_sampling_logprobs_are_the_trainer_s_before_and_after_new_weights(
    tmp_path: Path, kind: str, lora: LoraConfig | None
) -> None:
    folder = save_model(tmp_path, kind)
    config = PolicyConfig(model="x", context_tokens=128, trainer=TrainerConfig(learning_rate=2e-2), lora=lora)
    trainer = PolicyTrainer(folder, config=config, total_steps=9, seed=1, device="cpu", dtype=torch.float32)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu")).model
    options = EngineOptions(max_running=4, kv_tokens=1024, prefill_tokens=32, context_tokens=128)
    engine = EmbeddedEngine(model, config=options, device="cpu", seed=2)
    merger = None if lora is None else AdapterMerger(model, adapter=AdapterInfo(lora.rank, lora.alpha))
    for step in (1, 2, 3):
        before = copy.deepcopy(trainer.published_tensors())
        batch = sampled_batch(engine, step=step, temperature=0.7)
        metrics = trainer.train_step(batch).metrics
        assert metrics["staleness/max"] == 0
        assert metrics["max_abs_logprob_diff"] <= 1e-5
        tensors = trainer.published_tensors()
        assert any(not torch.equal(before[name], tensor) for name, tensor in tensors.items())
        weights = tensors if merger is None else merger.merge(tensors)
        engine.update_weights(weights, policy_version=step, partial=merger is not None)
