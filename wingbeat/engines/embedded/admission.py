"""Which requests an engine can serve at all; checked before they are queued, since a bad token id or an
impossible length would otherwise fail a whole batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from wingbeat.core.errors import ConfigError
from wingbeat.core.ports import GenerateRequest
from wingbeat.core.types import SamplingParams
from wingbeat.engines.embedded.options import EngineOptions


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The model's and the cache's limits."""

    context_tokens: int
    vocabulary: int

    def fault(self, request: GenerateRequest) -> str:
        """Why this request cannot be served; empty if it can."""
        prompt, sampling = request.prompt_ids, request.sampling
        if not len(prompt):
            return "prompt_ids must hold at least one token, got none"
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            return f"prompt token ids must lie in [0, {self.vocabulary}), got {min(prompt)}..{max(prompt)}"
        if sampling.max_tokens < 1:
            return f"max_tokens must be at least 1, got {sampling.max_tokens}"
        if len(prompt) + sampling.max_tokens > self.context_tokens:
            return (
                f"prompt ({len(prompt)} tokens) plus max_tokens ({sampling.max_tokens}) exceed the engine's "
                f"context of {self.context_tokens} tokens; shorten either, or raise kv_tokens or the context"
            )
        return _sampling_fault(sampling) or _resumption_fault(sampling, prompt_tokens=len(prompt))


def _sampling_fault(sampling: SamplingParams) -> str:
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        return f"temperature must be finite and at least 0, got {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p must lie in (0, 1], got {sampling.top_p}"
    if sampling.top_k < 0:
        return f"top_k must be at least 0 (0 is off), got {sampling.top_k}"
    return ""


def _resumption_fault(sampling: SamplingParams, *, prompt_tokens: int) -> str:
    if 0 <= sampling.resumed_tokens <= prompt_tokens:
        return ""
    return f"resumed_tokens must lie in [0, {prompt_tokens}] (the prompt's length), got {sampling.resumed_tokens}"


def resolve_limits(model: PreTrainedModel, options: EngineOptions, *, largest_row: int) -> RequestLimits:
    """The context is bounded by the model's positions and by the largest row that the KV pool can hold.

    Raises ConfigError if ``context_tokens`` asks for more than either.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or largest_row
    possible = min(positions, largest_row)
    if options.context_tokens is not None and options.context_tokens > possible:
        raise ConfigError(
            f"context_tokens must be at most {possible} (model: {positions} positions, largest KV row: {largest_row} "
            f"tokens, the largest power of two in kv_tokens), got {options.context_tokens}",
            param="context_tokens",
        )
    embedding = cast("nn.Embedding", model.get_input_embeddings())
    return RequestLimits(options.context_tokens or possible, embedding.weight.shape[0])
