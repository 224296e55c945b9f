"""Task sources on disk, one file each in ``RUN_DIR/tasks``, so that a restarted control deals on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from wingbeat.core.config.limits import LimitsConfig
from wingbeat.core.errors import PayloadTooLarge, SetupError
from wingbeat.core.files import write_atomically
from wingbeat.core.types import Split, Task
from wingbeat.dataflow.task_sources import digest_of


class SavedSource(msgspec.Struct, frozen=True):
    """One source's tasks of one split, in order."""

    source: str
    split: Split
    tasks: tuple[Task, ...]
    digest: str = ""
    """Of the tasks; "" where an older release wrote it."""


def save_source(run_dir: Path, saved: SavedSource) -> None:
    """Write (or replace) a source durably."""
    path = _path(run_dir, saved.source, saved.split)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, msgspec.json.encode(msgspec.structs.replace(saved, digest=digest_of(saved.tasks))))


def check_room(run_dir: Path, place: tuple[str, Split], size: int, *, limits: LimitsConfig) -> None:
    """Refuse a source (of so many bytes) that would be one too many: whoever may bring some must not fill the memory.

    ``place``: its name and split; what it replaces does not count.  Raises PayloadTooLarge.
    """
    own = _path(run_dir, *place)
    others = [path.stat().st_size for path in own.parent.glob("*.json") if path != own]
    if len(others) >= limits.task_sources:
        raise PayloadTooLarge(
            f"the run has {len(others)} task sources (limits.task_sources = {limits.task_sources}): an admin removes"
            " some, or raises the limit"
        )
    if sum(others) + size > limits.task_bytes:
        raise PayloadTooLarge(
            f"all task sources together would have {sum(others) + size} bytes (limits.task_bytes ="
            f" {limits.task_bytes}): an admin removes some, or raises the limit"
        )


def delete_source(run_dir: Path, source: str) -> None:
    """Remove both splits of a source, if they are there."""
    for split in Split:
        _path(run_dir, source, split).unlink(missing_ok=True)


def _path(run_dir: Path, source: str, split: Split) -> Path:
    name = hashlib.sha256(source.encode()).hexdigest()[:16]  # sources may hold any character
    return run_dir / "tasks" / f"{name}-{split}.json"


def load_sources(run_dir: Path) -> list[SavedSource]:
    """All saved sources, in a fixed order.  Raises SetupError where one is not what was written."""
    return [_load(path) for path in sorted((run_dir / "tasks").glob("*.json"))]


def _load(path: Path) -> SavedSource:
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=SavedSource)
        fault = "its digest differs" if saved.digest not in ("", digest_of(saved.tasks)) else ""
    except msgspec.MsgspecError as error:
        raise SetupError(_damaged(path, str(error))) from error
    if fault:
        raise SetupError(_damaged(path, fault))
    return saved


def _damaged(path: Path, why: str) -> str:
    return f"the task source {path} is damaged: {why}; delete the file, and put the source's tasks again once it runs"
