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
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from wingbeat.core.config import LoraConfig, PolicyConfig, TrainerConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample, TurnCredit
from wingbeat.trainer.rows import Row
from wingbeat.trainer.scores import TokenScores
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.trainer.token_batch import TokenBatch

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
_GEMMA3 = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_experts": 5, "num_local_experts": 5}
_GPT_OSS = {
    "head_dim": 8,
    "sliding_window": 5,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
BUILDERS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**(_SIZES | _GEMMA3))),
    "gptoss": lambda: GptOssForCausalLM(GptOssConfig(**(_SIZES | _GPT_OSS))),
    "qwen3moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**(_SIZES | _EXPERTS), head_dim=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**(_SIZES | _EXPERTS))),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**(_SIZES | _GEMMA | {"attn_logit_softcapping": 1.5}))),
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
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A saved tiny model of a kind and a seed, with a tokenizer of as many words."""
    made: dict[tuple[str, int], Path] = {}

    def folder(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = path = tmp_path_factory.mktemp(kind)
            build(kind, seed).save_pretrained(path)
            write_tokenizer(path)
        return made[kind, seed]

    return folder


@pytest.fixture
def make_trainer(model_folder: Callable[..., Path]) -> Callable[..., PolicyTrainer]:
    def make(
        kind: str = "qwen3",
        *,
        lora: LoraConfig | None = None,
        dtype: torch.dtype = torch.float32,
        total_steps: int = 100,
        **settings: Any,
    ) -> PolicyTrainer:
        needed = {"distill": {"teacher": str(model_folder(kind, 1))}, "sft": {"sft_min_reward": 0.5}}
        chosen = needed.get(settings.get("algorithm", ""), {}) | settings
        trainer = TrainerConfig(**({"learning_rate": 1e-2} | chosen))
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


def random_rows(rng: np.random.Generator) -> list[Row]:
    """Few tokens and many common beginnings: forks anywhere, also within turns, duplicates, rows inside of
    others, tokens that several rows train, branches that train nothing."""
    paths: list[np.ndarray] = []
    for _ in range(int(rng.integers(3, 9))):
        fresh = rng.integers(0, 3, int(rng.integers(2, 9)))
        if paths and rng.random() < 0.8:
            old = paths[int(rng.integers(len(paths)))]
            kept = old[: int(rng.integers(0, len(old) + 1))]
            fresh = np.concatenate([kept, fresh[: 0 if rng.random() < 0.2 and len(kept) > 1 else None]])
        paths.append(fresh[:24])
    rows = [random_row(rng, path, episode=index % 4, index=index) for index, path in enumerate(paths)]
    if not any(row.num_trained for row in rows):
        rows.append(random_row(rng, np.arange(3), start=1, index=len(rows)))
    return rows


def random_row(
    rng: np.random.Generator, path: np.ndarray, *, episode: int = 0, start: int | None = None, index: int = 0
) -> Row:
    """Trains turns of two tokens at random, or everything from ``start`` on."""
    trained = np.repeat(rng.random(len(path) // 2 + 1) < 0.6, 2)[: len(path)]
    trained[:1] = False
    targets_N = np.flatnonzero(trained) if start is None else np.arange(start, len(path))
    return Row(
        episode=episode,
        token_ids_T=path.astype(np.int32),
        targets_N=targets_N,
        sampling_logprobs_N=np.full(len(targets_N), -2, np.float32),
        versions_N=np.zeros(len(targets_N), np.int32),
        temperature=float(rng.choice([0.7, 1.0])),
        num_excluded=0,
        supports_N=np.full(len(targets_N), -1, np.int32),
        index=index,
    )


def forked_episode(
    rng: np.random.Generator,
    parents: Sequence[int],
    *,
    lengths: Sequence[int] = (),
    rewards: Sequence[float] = (),
    states: Sequence[str] = (),
    **facts: Any,
) -> EpisodeSamples:
    """An episode whose turns ``t0``, ``t1``, ... continue those at ``parents`` (-1: none).

    A turn has two prompt tokens and ``lengths`` sampled ones (unset: 2); there is a sample for each end, and each turn
    trains in the first sample that holds it.  The reward, unless given, is the sum of those of the turns.
    """
    count = len(parents)
    tokens = [rng.integers(0, VOCAB, 2 + (lengths[place] if lengths else 2)) for place in range(count)]
    turn_rewards = list(rewards) or [0.0] * count
    known = {"episode_id": "e", "attempt": 1, "group_id": "g", "policy": "p", "agent": "", "reward": sum(turn_rewards)}
    known |= facts
    samples: list[TrainingSample] = []
    trained: set[int] = set()
    for leaf in (place for place in range(count) if place not in parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        fresh = [place for place in path if place not in trained]
        trained |= set(fresh)
        starts = np.cumsum([0, *(len(tokens[place]) for place in path)])[:-1] + 2
        masks = [np.r_[0, 0, np.full(len(tokens[place]) - 2, place in fresh)] for place in path]
        sampled = np.concatenate(masks).astype(np.uint8)
        samples.append(
            TrainingSample.build(
                f"{known['episode_id']}s{leaf}",
                token_ids=np.concatenate([tokens[place] for place in path]).astype(np.int32),
                sampled=sampled,
                sampling_logprobs=np.where(sampled, -rng.uniform(1, 4, len(sampled)), 0).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                turn_ids=tuple(f"t{place}" for place in fresh),
                turn_starts=tuple(int(start) for start, place in zip(starts, path, strict=True) if place in fresh),
            )
        )
    turns = tuple(
        TurnCredit(
            f"t{place}", f"t{parent}" if parent >= 0 else "", turn_rewards[place], states[place] if states else ""
        )
        for place, parent in enumerate(parents)
    )
    return EpisodeSamples(**known, samples=tuple(samples), turns=turns)


@pytest.fixture(scope="session")
def make_episode() -> Callable[..., EpisodeSamples]:
    return forked_episode


@pytest.fixture(scope="session")
def make_rows() -> Callable[[np.random.Generator], list[Row]]:
    return random_rows


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Row]:
    return random_row


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainingBatch]:
    return random_batch


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., TrainingSample]:
    return sample


def token_batch(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    sequences: Sequence[int] | None = None,
    on_policy: bool = True,
    sft_weights: Sequence[float] | None = None,
    **scores: Any,
) -> TokenBatch:
    """Trained tokens whose policy probability is ``ratios`` times that of sampling, exp(-2); all float64.

    ``scores`` are those of :class:`TokenScores`.
    """

    def double(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    count = len(ratios)
    return TokenBatch(
        policy_logprobs_N=double(ratios).log().sub(2.0).requires_grad_(),
        sampling_logprobs_N=torch.full((count,), -2.0, dtype=torch.float64),
        entropy_N=torch.arange(count, dtype=torch.float64).requires_grad_(),
        advantages_N=double(advantages),
        weights_N=double(weights or [1.0] * count),
        sequences_N=torch.tensor(sequences or range(count)),
        on_policy_N=torch.full((count,), on_policy),
        sft_weights_N=None if sft_weights is None else double(sft_weights),
        scores=TokenScores(**{name: torch.as_tensor(values) for name, values in scores.items()}),
    )


@pytest.fixture(scope="session")
def make_tokens() -> Callable[..., TokenBatch]:
    return token_batch
