"""Turns (the nodes of an episode's token graph) and plans of turns that are still to be sampled.

A turn stores only what it adds: its own prompt segment (the tokens beyond its parent's end) and what
was sampled. Arrays and run lengths, no object per token.

A worked instance: ``[1,2] -> [10,11]``, then ``[1,2,10,11,20] -> [30]``::

    turn  parent  segment  sampled   prompt (segments and samples of all ancestors, then its own segment)
    a     -       [1, 2]   [10, 11]  [1, 2]
    b     a       [20]     [30]      [1, 2, 10, 11, 20]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.types import FinishReason, Provenance
from wingbeat.tracking.messages import Message


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One committed model call."""

    turn_id: str
    policy: str
    agent: str
    parent_id: str | None
    """The turn whose tokens this one extends; always of the same policy and agent."""
    segment: NDArray[np.int32]
    """[S] prompt tokens beyond the parent's end."""
    segment_runs: tuple[tuple[Provenance, int], ...]
    """Provenance of the segment's tokens, run-length."""
    sampled: NDArray[np.int32]
    """[T] tokens the policy drew."""
    logprobs: NDArray[np.float32]
    """[T] sampling logprobs; NaN where the engine gave none, which excludes that token from training."""
    versions: tuple[tuple[int, int], ...]
    """(policy version, number of sampled tokens), run-length, in order."""
    temperature: float
    finish_reason: FinishReason
    messages: tuple[Message, ...]
    """The conversation, this turn's reply last; shares its values with the parent's."""
    tools_digest: str
    """Digest of the request's tool schemas, "" without tools."""
    fork_reason: str
    """Why the prompt was rendered anew although the episode had turns; "" for first and continued turns."""
    chosen_by: str
    """What decided where several earlier turns fitted: "tool-call ids" or "latest"; "" where one did."""
    prompt_length: int
    """Number of prompt tokens, ancestors' included."""

    @property
    def reply(self) -> Message:
        return self.messages[-1]

    @property
    def num_sampled(self) -> int:
        return len(self.sampled)

    @property
    def trainable_T(self) -> NDArray[np.bool_]:
        """[T] whether a sampled token has a usable logprob."""
        return np.isfinite(self.logprobs)

    @property
    def num_missing_logprobs(self) -> int:
        return int(self.num_sampled - self.trainable_T.sum())

    @property
    def versions_T(self) -> NDArray[np.int32]:
        """[T] policy version per sampled token."""
        return np.repeat(
            np.array([version for version, _ in self.versions], np.int32),
            np.array([count for _, count in self.versions], np.int64),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """Which prompt to sample from, and what the turn will be once it is sampled. Changes nothing by itself."""

    policy: str
    agent: str
    parent: Turn | None
    prompt_ids: NDArray[np.int32]
    """[P] the whole prompt."""
    segment: NDArray[np.int32]
    """The prompt's own part beyond the parent's tokens."""
    forced_count: int
    """Leading tokens of the segment that close the parent's unfinished turn (provenance forced)."""
    messages: tuple[Message, ...]
    tools_digest: str
    fork_reason: str
    chosen_by: str
