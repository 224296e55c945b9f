"""Wire models of ``/api/keys``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat

from wingbeat.core.protocol import Identifier, Wire

RoleName = Literal["admin", "client", "worker", "collect"]


class KeyRequest(Wire):
    """``POST /api/keys``."""

    role: RoleName
    name: str = Field(default="", max_length=64)
    """For people; at most 64 printable characters without a slash."""
    expires_s: FiniteFloat | None = Field(default=None, gt=0)
    """Seconds from now; None: never."""
    train: bool = False
    """Role collect: whether the conversations may train."""
    record: bool = True
    """Role collect: whether they are kept at all."""
    policies: list[Identifier] = Field(default=[], max_length=1000)
    """Role collect: the policies that it may call; empty: all."""


class KeyReply(Wire):
    """One key, without the key.  Times are seconds since 1970."""

    id: str
    role: str
    name: str
    state: str
    """active, expired or revoked."""
    created_s: float
    expires_s: float | None
    revoked_s: float | None
    train: bool
    record: bool
    policies: list[str]


class NewKeyReply(KeyReply):
    """The answer to ``POST /api/keys``, the only one that shows a key."""

    key: str
