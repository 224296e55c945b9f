"""The task sources that clients announced, kept in the run directory: a restarted control deals on.

One file per source and split, ``tasks/HASH-SPLIT.json``, each the body of its ``PUT /api/tasks/{source}``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from wingbeat.core.files import write_atomically
from wingbeat.core.protocol import TaskModel, TaskSourceRequest
from wingbeat.core.types import Split, Task


class TaskSources:
    """Writes and reads them; the dealer holds what is dealt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, source: str, request: TaskSourceRequest) -> None:
        """Keep a source, in place of what it was before."""
        self._folder.mkdir(exist_ok=True)
        tasks = [TaskModel(source=source, id=task.id, payload=task.payload) for task in request.tasks]
        name = f"{hashlib.sha256(source.encode()).hexdigest()[:16]}-{request.split}.json"
        kept = TaskSourceRequest(split=request.split, tasks=tasks)
        write_atomically(self._folder / name, kept.model_dump_json().encode())

    def load(self) -> Iterator[tuple[str, Split, list[Task]]]:
        """Every source that was kept."""
        for path in sorted(self._folder.glob("*.json")):
            kept = TaskSourceRequest.model_validate_json(path.read_bytes())
            tasks = [Task(source=task.source, id=task.id, payload=task.payload) for task in kept.tasks]
            yield tasks[0].source, kept.split, tasks
