"""HTTP models about versions of agents: their shares of the work, how they fare, and how they leave."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from wingbeat.core.protocol import CodeDigest, Identifier, Number, Wire


class VariantsRequest(Wire):
    """``PUT /api/variants``: the labels' shares of the training groups, from now on."""

    weights: dict[Annotated[str, Field(min_length=1, max_length=200)], Number]
    """By label; they sum to 1 or less, labels without one share what is left.  Empty: whoever
    asks gets the next one."""


class LabelReply(Wire):
    """One label in ``GET /api/variants``."""

    weight: float | None
    """None: it shares what the others leave."""
    groups_dealt: int
    groups_counted: int
    share: float
    """Of all groups that counted, since this process began."""
    ahead: float
    """Groups ahead of its share; negative: behind."""


class VariantReply(Wire):
    """One version of an agent in ``GET /api/variants``."""

    label: str
    code: str
    here: bool
    """It asks for work, or runs episodes."""
    episodes: dict[str, int]
    """Attempts that ended, as ``split/outcome``."""
    reward_mean: dict[str, float]
    """Of its training episodes, by policy."""


class VariantsReply(Wire):
    weights: dict[str, float]
    labels: dict[str, LabelReply]
    variants: list[VariantReply]
    """The newest last."""


class ReleaseRequest(Wire):
    """``POST /api/tasks/release``: what a client that stops does not need any more."""

    lease_ids: list[Identifier] = Field(default=[], max_length=1000)
    """Leases under which it begins nothing: their slots go to others at once."""
    client_id: str = Field(default="", max_length=200)
    code: CodeDigest = ""
    label: str = Field(default="", max_length=200)
    instance: str = Field(default="", max_length=200)
    leaving: bool = False
    """This process (``instance``, else the client) asks for no more work with this code; its running episodes go on."""


class ReleaseReply(Wire):
    released: int
    """Leases that were still held."""
