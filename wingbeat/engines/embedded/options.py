"""Limits and policies of an embedded engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wingbeat.core.errors import ConfigError
from wingbeat.engines.embedded.pool import MIN_EXTENT_TOKENS


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How much an engine may hold and do per step.  Raises ConfigError on values it cannot honour."""

    max_running: int = 64
    """Requests decoded together."""
    kv_tokens: int = 131072
    """KV capacity in tokens.  One row holds at most the largest power of two within it."""
    prefill_tokens: int = 2048
    """Prompt tokens fed per step at most; longer prompts are fed in chunks, decoding goes on beside them."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """After new weights: recompute the KV of running requests (exact) or keep it (faster)."""
    context_tokens: int | None = None
    """Prompt plus sampled tokens of one request at most; None: what the model and ``kv_tokens`` allow."""
    row_headroom_tokens: int = 256
    """Room for sampled tokens that a row gets at once; beyond it a row grows by doubling (one copy)."""

    def __post_init__(self) -> None:
        minima = {
            "max_running": 1,
            "kv_tokens": MIN_EXTENT_TOKENS,
            "prefill_tokens": 1,
            "context_tokens": 2,
            "row_headroom_tokens": 1,
        }
        for name, minimum in minima.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, got {value}", param=name)
        if self.kv_on_update not in ("recompute", "keep"):
            raise ConfigError(
                f"kv_on_update must be 'recompute' or 'keep', got {self.kv_on_update!r}", param="kv_on_update"
            )
