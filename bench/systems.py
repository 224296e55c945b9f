"""The systems that the engine benchmark compares, each serving a workload at a given concurrency."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.workloads import VOCABULARY, Episode
from wingbeat.core.ports import GenerateRequest
from wingbeat.core.types import SamplingParams
from wingbeat.engines.embedded import EmbeddedEngine, EngineOptions

PAGE_TOKENS = 32
"""transformers shares prefixes by whole pages, so small ones are in its favour here."""
MAX_BATCH_TOKENS = 2048
RESULT_TIMEOUT_S = 600.0
MAX_EPISODE_TOKENS = 1024


def build_model() -> PreTrainedModel:
    """4 layers, hidden 256, 3.28 million parameters, float32, random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def serve_embedded(model: PreTrainedModel) -> Callable[[list[Episode], int], None]:
    """The embedded engine: an episode's next turn is submitted when the last one ends."""
    engine = EmbeddedEngine(copy.deepcopy(model), config=EngineOptions(max_running=64), device="cpu")
    serial = 0

    def serve(episodes: list[Episode], concurrency: int) -> None:
        nonlocal serial
        waiting = deque(episodes)
        live: dict[str, tuple[Episode, list[int]]] = {}

        def submit(episode: Episode) -> None:
            nonlocal serial
            serial += 1
            params = SamplingParams(max_tokens=episode.due)
            live[str(serial)] = (episode, [])
            engine.submit(GenerateRequest(str(serial), tuple(episode.tokens), params, cache_key=episode.name))

        while waiting and len(live) < concurrency:
            submit(waiting.popleft())
        while live:
            for event in engine.step():
                episode, sampled = live[event.request_id]
                sampled.extend(event.token_ids)
                if event.finish_reason is None:
                    continue
                if event.error:
                    raise RuntimeError(event.error)
                del live[event.request_id]
                if episode.advance(sampled):
                    submit(episode)
                elif waiting:
                    submit(waiting.popleft())

    return serve


def serve_generate(model: PreTrainedModel) -> Callable[[list[Episode], int], None]:
    """``generate``: batches of ``concurrency`` episodes, left-padded, turn by turn, up to the longest's length."""
    hf = cast(Any, model)

    def serve(episodes: list[Episode], concurrency: int) -> None:
        for start in range(0, len(episodes), concurrency):
            batch = episodes[start : start + concurrency]
            while batch:
                width = max(len(e.tokens) for e in batch)
                ids = torch.tensor([[0] * (width - len(e.tokens)) + e.tokens for e in batch])
                mask = torch.tensor([[0] * (width - len(e.tokens)) + [1] * len(e.tokens) for e in batch])
                out = hf.generate(
                    ids, attention_mask=mask, max_new_tokens=max(e.due for e in batch), do_sample=True, top_k=0
                )
                rows = out[:, width:].tolist()
                batch = [e for e, row in zip(batch, rows, strict=True) if e.advance(row[: e.due])]

    return serve


def serve_generate_batch(model: PreTrainedModel) -> Callable[[list[Episode], int], None]:
    """transformers' continuous batching (what ``generate_batch`` runs on), fed turn by turn like our engine."""
    hf = cast(Any, model)
    generation = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)

    def serve(episodes: list[Episode], concurrency: int) -> None:
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=concurrency * MAX_EPISODE_TOKENS // PAGE_TOKENS,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=concurrency,
        )
        with hf.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False, block=True, timeout=10
        ) as manager:
            waiting = deque(episodes)
            live: dict[str, Episode] = {}

            def submit(episode: Episode) -> None:
                live[manager.add_request(list(episode.tokens), max_new_tokens=episode.due)] = episode

            while waiting and len(live) < concurrency:
                submit(waiting.popleft())
            while live:
                result = manager.get_result(timeout=RESULT_TIMEOUT_S)
                if result is None:
                    raise RuntimeError("transformers' continuous batching gave no result in time")
                episode = live.pop(result.request_id)
                if len(result.generated_tokens) != episode.due:
                    raise RuntimeError(f"expected {episode.due} tokens, got {len(result.generated_tokens)}")
                if episode.advance(list(result.generated_tokens)):
                    submit(episode)
                elif waiting:
                    submit(waiting.popleft())

    return serve


SYSTEMS: dict[str, Callable[[PreTrainedModel], Callable[[list[Episode], int], None]]] = {
    "embedded": serve_embedded,
    "generate": serve_generate,
    "generate_batch": serve_generate_batch,
}
