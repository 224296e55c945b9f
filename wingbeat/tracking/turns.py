"""Turns (the nodes of an episode's token graph) and plans of turns that are still to be sampled.

A turn stores only what it adds: its own prompt segment (the tokens beyond its parent's end) and what
was sampled. Arrays and run lengths, no object per token.

A worked instance: ``[1,2] -> [10,11]``, then ``[1,2,10,11,20] -> [30]``::

    turn  parent  segment  sampled   prompt (segments and samples of all ancestors, then its own segment)
    a     -       [1, 2]   [10, 11]  [1, 2]
    b     a       [20]     [30]      [1, 2, 10, 11, 20]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.types import FinishReason, Provenance
from wingbeat.tracking.arrays import NO_SUPPORTS
from wingbeat.tracking.conversation import Conversation
from wingbeat.tracking.messages import Message


class TurnKind(StrEnum):
    """What a turn was asked with."""

    CHAT = "chat"
    """Messages, through the chat template."""
    TEXT = "text"
    """Plain text."""
    TOKENS = "tokens"
    """Token ids."""


@dataclass(frozen=True, slots=True)
class TextKey:
    """Recognises a rendered text again within this process, without keeping it."""

    length: int
    hash: int

    @classmethod
    def of(cls, text: str) -> TextKey:
        return cls(len(text), hash(text))

    def begins(self, text: str) -> bool:
        """Whether ``text`` begins with the text of this key."""
        return len(text) >= self.length and hash(text[: self.length]) == self.hash


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One committed model call."""

    turn_id: str
    policy: str
    agent: str
    parent_id: str | None
    """The turn whose tokens this one extends; always of the same policy and agent."""
    kind: TurnKind
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
    conversation: Conversation
    """The messages of a chat turn, its reply last; empty for other kinds."""
    tools_digest: str
    """Digest of the request's tool schemas, "" without tools."""
    fork_reason: str
    """Why this prompt is not the simple continuation of the newest turn: the first difference; "" where it is."""
    chosen_by: str
    """What decided where several earlier turns fitted: "tool-call ids", "latest" or "previous response id"; "" where
    one did."""
    prompt_length: int
    """Number of prompt tokens, ancestors' included."""
    prompt_text: str = ""
    """Of a text turn: its prompt beyond the parent's end."""
    sampled_text: str = ""
    """Of a text turn: what its sampled tokens say."""
    rendered: TextKey | None = None
    """Of a chat turn of this process: its whole prompt, as the template wrote it."""
    support_table: tuple[bytes, ...] = ()
    """Distinct :mod:`wingbeat.core.support` blobs."""
    support_index: NDArray[np.int32] = field(default_factory=lambda: NO_SUPPORTS)
    """[T] each sampled token's place in the table, -1 for the whole vocabulary; [0] where the table is empty."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, this turn's reply last; empty for text and token turns."""
        return self.conversation.messages

    @property
    def reply(self) -> Message:
        """What was answered."""
        return self.conversation.message or Message("assistant", self.sampled_text)

    @property
    def num_sampled(self) -> int:
        return len(self.sampled)

    @property
    def end(self) -> int:
        """Number of tokens up to and including the last sampled one."""
        return self.prompt_length + len(self.sampled)

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
    """[P] the whole prompt. The graph keeps only the segment."""
    segment: NDArray[np.int32]
    """The prompt's own part beyond the parent's tokens."""
    kind: TurnKind = TurnKind.CHAT
    forced_count: int = 0
    """Leading tokens of the segment that close the parent's unfinished turn (provenance forced)."""
    news: tuple[Message, ...] = ()
    """Of a chat: the messages beyond the parent's."""
    tools_digest: str = ""
    fork_reason: str = ""
    chosen_by: str = ""
    prompt_text: str = ""
    """Of a text: the prompt beyond the parent's end."""
    rendered: TextKey | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation of a chat."""
        return (*(() if self.parent is None else self.parent.messages), *self.news)
