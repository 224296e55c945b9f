"""Engines over HTTP: ``engines`` of ``GET /api/status``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Wire(BaseModel):
    """As :class:`wingbeat.core.protocol.Wire`, which holds these."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServedReply(_Wire):
    """The weights of one policy that an engine said last that it serves."""

    version: int
    lineage: int
    checksum: str
    """As the engine computed it over what it loaded."""
    lag: int
    """Versions behind the freshest engine."""
    rate: float
    """Tokens per second of one generation, as routing expects them; 1 on all engines while nothing is measured."""
    gets_calls: bool
    """False while it lags too far behind, leaves or is quarantined."""


class EngineReply(_Wire):
    """One connected engine, in ``GET /api/status``."""

    name: str
    host: str
    """Equal for processes that share memory."""
    pid: int
    software: dict[str, str]
    parallelism: int
    """Processes that share each model's weights."""
    state: str
    """serving, loading (it serves nothing yet) or leaving."""
    in_flight: int
    """Generations that it has."""
    served: dict[str, ServedReply]
    """Per policy."""
    quarantined: dict[str, str]
    """Per policy, why nothing that it says of it is believed."""
