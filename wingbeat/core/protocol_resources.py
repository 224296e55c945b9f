"""HTTP models of ``/api/resources``: what pools report to control."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from wingbeat.core.protocol import Wire
from wingbeat.core.resource_reports import MAX_CLASSES, ResourceClass


class ResourceReport(Wire):
    """``POST /api/resources``: what the pool of one process has and did."""

    client_id: Annotated[str, Field(min_length=1, max_length=200)]
    url: Annotated[str, Field(max_length=2000, pattern=r"^(https?://[^\s]+)?$")] = ""
    """Where it lends to others: that of a resources server, which an admin or worker key announces."""
    kinds: Annotated[tuple[str, ...], Field(max_length=MAX_CLASSES)] = ()
    """Which kinds it lends, with ``url``."""
    leaving: bool = False
    """The last report: what it has now is gone."""
    classes: Annotated[tuple[ResourceClass, ...], Field(max_length=MAX_CLASSES)] = ()


class ReportReply(Wire):
    """The answer to a report."""

    report_s: float
    """Seconds until the next one; three times as long is taken for gone."""


class ResourceServer(Wire):
    """One resources server, in ``GET /api/resources/servers``."""

    url: str
    kinds: tuple[str, ...] = ()
    leased: int = 0
    waiting: int = 0


class ResourceServers(Wire):
    """``GET /api/resources/servers``: those that reported of late, the least busy first."""

    servers: list[ResourceServer]
