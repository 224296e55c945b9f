"""Task sources on disk, one file each in ``RUN_DIR/tasks``, so that a restarted control deals on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from wingbeat.core.files import write_atomically
from wingbeat.core.types import Split, Task


class SavedSource(msgspec.Struct, frozen=True):
    """One source's tasks of one split, in order."""

    source: str
    split: Split
    tasks: tuple[Task, ...]


def save_source(run_dir: Path, saved: SavedSource) -> None:
    """Write (or replace) a source durably."""
    path = _path(run_dir, saved.source, saved.split)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, msgspec.json.encode(saved))


def delete_source(run_dir: Path, source: str) -> None:
    """Remove both splits of a source, if they are there."""
    for split in Split:
        _path(run_dir, source, split).unlink(missing_ok=True)


def _path(run_dir: Path, source: str, split: Split) -> Path:
    name = hashlib.sha256(source.encode()).hexdigest()[:16]  # sources may hold any character
    return run_dir / "tasks" / f"{name}-{split}.json"


def load_sources(run_dir: Path) -> list[SavedSource]:
    """All saved sources, in a fixed order."""
    paths = sorted((run_dir / "tasks").glob("*.json"))
    return [msgspec.json.decode(path.read_bytes(), type=SavedSource) for path in paths]
