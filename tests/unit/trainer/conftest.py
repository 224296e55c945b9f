"""Tiny random models on disk, and batches of random episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from wingbeat.core.config.schema import LoraConfig, PolicyConfig, TrainerConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.trainer.single import PolicyTrainer

VOCAB = 48
CONTEXT = 32
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "final_logit_softcapping": 3.0}
BUILDERS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**(_SIZES | _GEMMA))),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**_SIZES, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**_SIZES, logits_scaling=4.0)),
}


def build(kind: str, seed: int = 0) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return BUILDERS[kind]().eval()


def write_tokenizer(folder: Path) -> None:
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def build_model() -> Callable[..., Any]:
    return build


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved tiny model of a kind, with a tokenizer of as many words."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            build(kind).save_pretrained(made[kind])
            write_tokenizer(made[kind])
        return made[kind]

    return folder


@pytest.fixture
def make_trainer(model_folder: Callable[[str], Path]) -> Callable[..., PolicyTrainer]:
    def make(
        kind: str = "qwen3",
        *,
        lora: LoraConfig | None = None,
        dtype: torch.dtype = torch.float32,
        total_steps: int = 100,
        **settings: Any,
    ) -> PolicyTrainer:
        trainer = TrainerConfig(**({"learning_rate": 1e-2} | settings))
        config = PolicyConfig(model="x", context_tokens=CONTEXT, trainer=trainer, lora=lora)
        return PolicyTrainer(
            model_folder(kind), config=config, total_steps=total_steps, seed=3, device="cpu", dtype=dtype
        )

    return make


def sample(
    rng: np.random.Generator,
    sample_id: str,
    *,
    length: int,
    version: int = 0,
    temperature: float = 1.0,
    logprobs: Sequence[float] | None = None,
) -> TrainingSample:
    """Random tokens, of which a random half after the prompt's two were sampled."""
    sampled = (rng.random(length) < 0.5).astype(np.uint8)
    sampled[:2], sampled[-1] = 0, 1
    drawn = rng.normal(-2.0, 0.7, length) if logprobs is None else np.asarray(logprobs)
    return TrainingSample.build(
        sample_id,
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        sampled=sampled,
        sampling_logprobs=np.where(sampled, np.minimum(drawn, -0.01), 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        temperature=temperature,
    )


def random_batch(
    *, step: int = 1, seed: int = 0, groups: int = 2, size: int = 4, rewards: Sequence[float] | None = None
) -> TrainingBatch:
    """Groups of episodes with one to three samples of different lengths."""
    rng = np.random.default_rng(seed)
    episodes: list[EpisodeSamples] = []
    for index in range(groups * size):
        samples = tuple(
            sample(rng, f"e{index}s{part}", length=int(rng.integers(5, 20)), version=step - 1)
            for part in range(1 + index % 3)
        )
        episodes.append(
            EpisodeSamples(
                episode_id=f"e{index}",
                attempt=1,
                group_id=f"g{index // size}",
                policy="p",
                agent="",
                reward=float(rng.random()) if rewards is None else rewards[index],
                samples=samples,
            )
        )
    return TrainingBatch(batch_id=f"b{step}", policy="p", step=step, episodes=tuple(episodes), seed=seed)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainingBatch]:
    return random_batch


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., TrainingSample]:
    return sample
