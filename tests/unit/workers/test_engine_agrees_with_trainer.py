"""Across the border: what the engine says a token's logprob was is what the trainer computes for it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from wingbeat.core.config import LoraConfig, PolicyConfig, TrainerConfig
from wingbeat.core.ports import GenerateRequest
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.types import SamplingParams
from wingbeat.core.weight_protocol import AdapterInfo
from wingbeat.engines.embedded import AdapterMerger, EmbeddedEngine, EngineOptions, GrammarCompiler
from wingbeat.trainer.models import load_model
from wingbeat.trainer.single import PolicyTrainer

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

VOCABULARY = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
"""The tokenizer's vocabulary, before the token that ends a text; the rest of the model's is padding."""
GRAMMAR = "start: /[a-m]{2,30}([0-9][n-z])*/"
WAYS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.7},
    {"top_k": 6},
    {"grammar": GRAMMAR},
    {"grammar": GRAMMAR, "top_p": 0.9},
    {"grammar": GRAMMAR, "top_k": 9, "top_p": 0.8},
]
"""How the requests of a batch are drawn, one after the other."""
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
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def sampled_batch(
    engine: EmbeddedEngine, *, step: int, temperature: float, ways: list[dict[str, Any]]
) -> TrainingBatch:
    """Two groups of three episodes of two turns, as the engine samples them, with unequal rewards."""
    rng = np.random.default_rng(step)
    prompts = [rng.integers(0, VOCABULARY, 5 + 4 * index).astype(np.int32) for index in range(6)]
    drawn: list[list[tuple[Any, list[int], list[float], list[int], list[bytes]]]] = [[] for _ in prompts]
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            way = ways[(index + turn) % len(ways)]
            params = SamplingParams(
                max_tokens=8 + index, temperature=temperature, stop_token_ids=(len(LETTERS),) if way else (), **way
            )
            engine.submit(GenerateRequest(f"{step}.{turn}.{index}", prompt.tolist(), params, f"e{index}"))
        found: dict[int, tuple[list[int], list[float], list[int], list[bytes]]] = {
            i: ([], [], [], []) for i in range(len(prompts))
        }
        while engine.has_work():
            for event in engine.step():
                tokens, logprobs, versions, supports = found[int(event.request_id.rpartition(".")[2])]
                assert not event.error
                tokens.extend(event.token_ids)
                logprobs.extend(event.logprobs)
                versions.extend([event.policy_version] * len(event.token_ids))
                supports.extend(event.supports or [b""] * len(event.token_ids))
        for index, (tokens, logprobs, versions, supports) in found.items():
            drawn[index].append((prompts[index], tokens, logprobs, versions, supports))
            prompts[index] = np.concatenate([prompts[index], tokens, rng.integers(0, VOCABULARY, 3)]).astype(np.int32)
    episodes = tuple(_episode(index, turns, temperature) for index, turns in enumerate(drawn))
    return TrainingBatch(batch_id=f"b{step}", policy="p", step=step, episodes=episodes, seed=step)


def _episode(index: int, turns: list[Any], temperature: float) -> EpisodeSamples:
    ids = np.concatenate([turns[-1][0], turns[-1][1]]).astype(np.int32)
    sampled, logprobs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
    versions, supports = np.full(len(ids), -1, np.int32), np.full(len(ids), -1, np.int32)
    table: dict[bytes, int] = {}
    for prompt, tokens, drawn, under, blobs in turns:
        own = slice(len(prompt), len(prompt) + len(tokens))
        sampled[own], logprobs[own], versions[own] = 1, drawn, under
        supports[own] = [table.setdefault(blob, len(table)) if blob else -1 for blob in blobs]
    sample = TrainingSample.build(
        f"s{index}",
        token_ids=ids,
        sampled=sampled,
        sampling_logprobs=logprobs,
        versions=versions,
        temperature=temperature,
        support_table=tuple(table),
        support_index=supports,
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


@pytest.mark.parametrize("ways", [WAYS[:1], WAYS], ids=["whole vocabulary", "restricted"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=12.0)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", list(FAMILIES))
def test_sampling_logprobs_are_the_trainer_s_before_and_after_new_weights(
    tmp_path: Path, kind: str, lora: LoraConfig | None, ways: list[dict[str, Any]]
) -> None:
    folder = save_model(tmp_path, kind)
    config = PolicyConfig(model="x", context_tokens=128, trainer=TrainerConfig(learning_rate=2e-2), lora=lora)
    trainer = PolicyTrainer(folder, config=config, total_steps=9, seed=1, device="cpu", dtype=torch.float32)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu")).model
    options = EngineOptions(max_running=4, kv_tokens=1024, prefill_tokens=32, context_tokens=128)
    engine = EmbeddedEngine(model, config=options, grammars=GrammarCompiler(folder), device="cpu", seed=2)
    merger = None if lora is None else AdapterMerger(model, adapter=AdapterInfo(lora.rank, lora.alpha))
    for step in (1, 2, 3):
        before = copy.deepcopy(trainer.published_tensors())
        batch = sampled_batch(engine, step=step, temperature=0.7, ways=ways)
        tables = [s.support_table for e in batch.episodes for s in e.samples]
        assert any(tables) == (len(ways) > 1)
        metrics = trainer.train_step(batch).metrics
        assert metrics["staleness/max"] == 0
        assert metrics["max_abs_logprob_diff"] <= 1e-5
        tensors = trainer.published_tensors()
        assert any(not torch.equal(before[name], tensor) for name, tensor in tensors.items())
        weights = tensors if merger is None else merger.merge(tensors)
        engine.update_weights(weights, policy_version=step, partial=merger is not None)
