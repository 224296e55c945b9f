"""A user's own tasks: a Python file with ``train_tasks()`` and, to be evaluated, ``eval_tasks()``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from wingbeat.client.user_code import load_python_file
from wingbeat.core.errors import ConfigError
from wingbeat.core.types import Task


@dataclass(frozen=True, slots=True)
class TasksFile:
    """The tasks of a file; ``eval`` is empty if it defines no ``eval_tasks``."""

    path: Path
    train: tuple[Task, ...]
    eval: tuple[Task, ...]


def load_tasks_file(path: Path) -> TasksFile:
    """Run a file's functions and check what they return.

    Raises ConfigError that names function, position and fault; SetupError if the file does not load.
    """
    module = load_python_file(path, what="tasks")
    train = _call(module, "train_tasks", path)
    if train is None:
        raise ConfigError(f"expected a function train_tasks() in {path}, got none")
    evaluation = _call(module, "eval_tasks", path) or ()
    if not train:
        raise ConfigError(f"{path}: expected at least one task of train_tasks(), got none")
    shared = {_content(task) for task in train} & {_content(task) for task in evaluation}
    if shared:
        raise ConfigError(
            f"{path}: expected eval_tasks() to be held out, got {len(shared)} tasks with the payload of a training "
            "task; remove them from train_tasks()"
        )
    return TasksFile(path=path, train=train, eval=evaluation)


def _call(module: ModuleType, name: str, path: Path) -> tuple[Task, ...] | None:
    function: Callable[[], Iterable[Any]] | None = getattr(module, name, None)
    if function is None:
        return None
    if not callable(function):
        raise ConfigError(f"{path}: expected a function {name}(), got {function!r}")
    try:
        returned = function()
        items = list(returned)
    except Exception as error:
        raise ConfigError(f"{path}: {name}() raised {type(error).__name__}: {error}") from error
    for position, item in enumerate(items):
        _check(item, f"{path}: {name}()[{position}]")
    _check_ids(items, f"{path}: {name}()")
    return tuple(items)


def _check(item: Any, where: str) -> None:
    if not isinstance(item, Task):
        raise ConfigError(f"{where}: expected a wingbeat.Task, got {item!r:.200}")
    if not item.source or not item.id:
        raise ConfigError(f"{where}: expected a task with a source and an id, got {item.source!r} and {item.id!r}")
    try:
        _content(item)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected a payload of JSON data, got {error}") from error


def _check_ids(tasks: list[Task], where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for task in tasks:
        key = (task.source, task.id)
        if key in seen:
            raise ConfigError(f"{where}: expected ids to be unique in a source, got {task.id!r} twice")
        seen.add(key)


def _content(task: Task) -> str:
    return json.dumps(task.payload, sort_keys=True, allow_nan=False)
