"""What one server serves: models by name, and of which version each token of them is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from wingbeat.core.ports import TokenEvent
from wingbeat.engines.vllm.files import KeptFile


@dataclass(frozen=True, slots=True)
class Weights:
    """What a model serves, to be loaded again into a new server."""

    file: KeptFile
    checksum: str
    version: int
    lineage: int
    folder: Path | None = None
    """That of an adapter."""

    @property
    def path(self) -> Path:
        return self.file.path if self.folder is None else self.folder


@dataclass(slots=True)
class ServedModel:
    """One name that requests may use."""

    name: str
    since: list[tuple[int, int, int]] = field(default_factory=lambda: [(0, 0, 0)])
    """(label, version, lineage) from which each version is served, oldest first."""
    weights: Weights | None = None
    """None: those of the model folder."""
    events: list[TokenEvent] = field(default_factory=list)
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0

    @property
    def version(self) -> int:
        return self.since[-1][1]

    @property
    def lineage(self) -> int:
        return self.since[-1][2]

    @property
    def label(self) -> int:
        return self.since[-1][0]

    def sampled_by(self, label: str) -> tuple[int, int]:
        """(version, lineage) of the weights with that label of the server; "" is the latest."""
        number = int(label) if label.isdecimal() else 0
        for since, version, lineage in reversed(self.since):
            if not label or since <= number:
                return version, lineage
        return self.since[0][1:]
