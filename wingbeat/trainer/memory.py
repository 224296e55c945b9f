"""How large a forward may be: what the configuration says, less where that did not fit into memory.

An allocation that fails says nothing about the step but that its forwards are too large.  Whoever runs forwards does
so in attempts: one that does not fit is given up whole, its tensors are freed, the budget is halved, and the attempt
is repeated from clean gradients.  Every loss is a sum over tokens whose weights were fixed before, so the gradient is
the one that larger forwards would have given, but for rounding.  The budget is remembered: later steps begin with it,
and checkpoints hold it, so that a replay makes the same forwards.

    attempt ──▶ a forward fails ──▶ free, halve ──▶ clean gradients ──▶ attempt
                     └── it held a single sample: give up, by name

What kills the process from outside (Linux's out-of-memory killer) cannot be caught.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from wingbeat.core.errors import SetupError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_ALLOCATOR_MESSAGES = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "not enough memory", "bad_alloc")
"""Of RuntimeErrors: the CPU's allocator, a device's runtime, a library's workspace, the CPU's allocator elsewhere, and
what C++ throws, as torch passes it on."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR_MESSAGES)


def free_garbage() -> None:
    """Give back what only cycles hold, and what the device's allocator keeps for later."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@dataclass(frozen=True, slots=True)
class ForwardSize:
    """What one forward holds at once."""

    num_rows: int
    num_tokens: int
    """Padding included."""
    longest: int
    """Tokens of the longest row: no forward can hold less of it."""


class DoesNotFit(Exception):
    """A forward ran out of memory; raised in place of what the allocator raised."""

    def __init__(self, size: ForwardSize, reason: str) -> None:
        super().__init__(reason)
        self.size = size


class ForwardBudget:
    """The tokens of one forward at most, shared by all models of a trainer."""

    def __init__(self, tokens: int) -> None:
        self._configured = self._tokens = tokens
        self._retries = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def state(self) -> tuple[int, int]:
        """Tokens as configured, and as they are now."""
        return self._configured, self._tokens

    def restore(self, configured: int, tokens: int) -> None:
        """Go on with a :attr:`state`; where the configuration has changed since, it is what counts."""
        self._tokens = tokens if configured == self._configured else self._configured

    @contextmanager
    def holding(self, size: ForwardSize) -> Iterator[None]:
        """Around a forward and its backward.  Raises DoesNotFit where an allocation fails."""
        reason = ""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        if reason:
            raise DoesNotFit(size, reason)

    def until_it_fits(self, attempt: Callable[[], Result], *, clean: Callable[[], object]) -> Result:
        """What ``attempt`` gives, once its forwards fit; ``clean`` makes it repeatable after a failure.

        Raises SetupError where a forward of a single sample does not fit.
        """
        while True:
            try:
                return attempt()
            except DoesNotFit as failure:
                size, reason = failure.size, str(failure)
            # Only here, where the exception is gone, nothing holds the forward's tensors any more.
            free_garbage()
            self._shrink(size, reason=reason)
            clean()

    def metrics(self) -> dict[str, float]:
        """Of the time since this was asked last."""
        retries, self._retries = self._retries, 0
        return {"perf/oom_retries": float(retries), "perf/micro_batch_tokens": float(self._tokens)}

    def _shrink(self, size: ForwardSize, *, reason: str) -> None:
        if size.num_tokens <= size.longest:
            raise SetupError(
                f"expected a forward of one sample of {size.longest} tokens to fit into memory, got: {reason}. No"
                " micro_batch_tokens makes it smaller: switch gradient_checkpointing on, lower logprob_chunk_tokens or"
                " context_tokens, train LoRA adapters, use dtype bfloat16, or more memory"
            )
        before, self._tokens = self._tokens, max(1, min(self._tokens, size.num_tokens) // 2)
        self._retries += 1
        logger.warning(
            "a forward of %d samples and %d tokens did not fit into memory (%s): micro_batch_tokens goes from %d to %d"
            " until the configuration changes it, and the update is repeated",
            *(size.num_rows, size.num_tokens, reason, before, self._tokens),
        )
