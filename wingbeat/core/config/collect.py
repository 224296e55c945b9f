"""Configuration of passive collection: conversations of applications in production."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wingbeat.core.config.section import Section


class CollectConfig(Section):
    """Conversations of applications that call with a key of role `collect` (docs/howto/passive.md)."""

    feedback_s: float = Field(
        default=7 * 86400.0,
        gt=0,
        description="How long a conversation waits for feedback after its last call; then it is closed unscored.",
    )
    idle_s: float = Field(
        default=600.0, gt=0, description="A conversation without a call for so long is kept on disk only."
    )
    max_open: int = Field(
        default=10_000,
        ge=1,
        description="Conversations of one key that wait for feedback; beyond it the one that was idle longest is"
        " closed unscored.",
    )
    max_disk_mb: int = Field(
        default=4096,
        ge=1,
        description="Size of all conversations that wait for feedback; beyond it those that were idle longest are"
        " closed unscored.",
    )
    keep_unscored: bool = Field(
        default=True,
        description="Record conversations that are closed unscored, to inspect and export them; `false` deletes their"
        " text and only counts them.",
    )
    temperature: Literal["client", "policy"] = Field(
        default="client",
        description="Sample as the application asks (`client`; greedy tokens do not train), or, with keys that may"
        " train, at the policy's own temperature whatever it asks (`policy`).",
    )
