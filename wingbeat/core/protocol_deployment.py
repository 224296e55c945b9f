"""HTTP models of ``/api/deployment``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from wingbeat.core.deployment import MAX_ENGINES
from wingbeat.core.protocol import Wire


class DeploymentRequest(Wire):
    """``PUT /api/deployment``: have another number of engines from now on."""

    engines: Annotated[int, Strict()] = Field(ge=0, le=MAX_ENGINES)
    """Those that the server's own supervisor starts; engines that dialled in from elsewhere are not among them."""


class DeploymentReply(Wire):
    """``GET /api/deployment``."""

    engines: int
    """Wanted of the server's own supervisor."""
    connected: list[str]
    """Names of all engines that are connected now, also of those that dialled in from elsewhere."""
