"""Tiny random models of three families, and a driver that collects what an engine says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from wingbeat.core.ports import GenerateRequest, TokenEvent
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.engines.embedded import EmbeddedEngine, EngineOptions, GrammarCompiler

VOCABULARY = 96
SLIDING_WINDOW = 16
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _build(kind: str, *, vocabulary: int) -> PreTrainedModel:
    common = {**COMMON, "vocab_size": vocabulary}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    if kind == "qwen3-tied":
        return Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**common))
    sliding = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **common,
            sliding_window=SLIDING_WINDOW,
            layer_types=sliding,
            final_logit_softcapping=30.0,
            query_pre_attn_scalar=8,
        )
    )


def make_model(kind: str = "qwen3", *, seed: int = 0, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """Weights large enough that attention to a wrong token shows in the logits."""
    torch.manual_seed(seed)
    model = _build(kind, vocabulary=vocabulary)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


@dataclass
class Reply:
    """All that one request received."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    """One per token; "" for the whole vocabulary, as where an event carries none."""
    ends: list[FinishReason] = field(default_factory=list)
    error: str = ""


class Harness:
    """Drives engines and recomputes their logprobs with a plain forward pass."""

    make_model = staticmethod(make_model)
    vocabulary = VOCABULARY

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}

    def engine(
        self,
        model: PreTrainedModel,
        *,
        seed: int = 0,
        version: int = 0,
        grammars: GrammarCompiler | None = None,
        **options: object,
    ) -> EmbeddedEngine:
        settings = {"max_running": 8, "kv_tokens": 4096, "prefill_tokens": 64, **options}
        config = EngineOptions(**settings)  # pyright: ignore[reportArgumentType]
        return EmbeddedEngine(
            copy.deepcopy(model), config=config, grammars=grammars, device="cpu", seed=seed, policy_version=version
        )

    def request(
        self, name: str, prompt: Sequence[int], max_tokens: int = 8, *, cache_key: str = "", **sampling: object
    ) -> GenerateRequest:
        return GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling), cache_key)  # pyright: ignore[reportArgumentType]

    def prompt(self, length: int, *, seed: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    def record(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            reply = self.replies.setdefault(event.request_id, Reply())
            assert not reply.ends, f"{event.request_id} got an event after its end"
            reply.token_ids.extend(event.token_ids)
            reply.logprobs.extend(event.logprobs)
            reply.versions.extend([event.policy_version] * len(event.token_ids))
            assert len(event.supports) in (0, len(event.token_ids))
            reply.supports.extend(event.supports or (b"",) * len(event.token_ids))
            reply.error = event.error
            if event.finish_reason is not None:
                reply.ends.append(event.finish_reason)

    def drain(self, engine: EmbeddedEngine, *, after_step: Callable[[], None] | None = None) -> dict[str, Reply]:
        while engine.has_work():
            self.record(engine.step())
            if after_step is not None:
                after_step()
        return self.replies

    @torch.no_grad()
    def scores(
        self, model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int], *, temperature: float = 1.0
    ) -> torch.Tensor:
        """logits / T [T, V] of a fresh forward pass over everything, at the sampled tokens."""
        logits_TV = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0].float() / temperature
        return logits_TV[len(prompt) - 1 : -1]

    def reference(
        self, model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """log_softmax(logits / T) of a fresh forward pass over everything, at the sampled tokens."""
        logprobs_TV = self.scores(model, prompt, sampled, temperature=temperature).log_softmax(-1)
        return logprobs_TV.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()

    def assert_close(self, got: Sequence[float], expected: Sequence[float]) -> None:
        difference = (torch.tensor(got, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)).abs()
        assert difference.mean() <= 1e-5
        assert difference.max() <= 5e-5


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture(scope="session")
def harness_factory() -> Callable[[], tuple[Harness, list[PreTrainedModel]]]:
    """A fresh harness per hypothesis example, over two models made once."""
    models = [make_model("gemma3", seed=0), make_model("gemma3", seed=1)]
    return lambda: (Harness(), models)
