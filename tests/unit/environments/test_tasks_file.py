"""A user's tasks file."""

from __future__ import annotations

from pathlib import Path

import pytest

from wingbeat.core.errors import ConfigError, SetupError
from wingbeat.core.types import Task
from wingbeat.environments import load_tasks_file

GOOD = """
from wingbeat import Task

def _tasks(numbers):
    return [Task("squares", str(n), {"question": f"{n}*{n}"}) for n in numbers]

def train_tasks():
    return _tasks(range(3))

def eval_tasks():
    yield from _tasks([7])
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "tasks.py"
    path.write_text(text)
    return path


def test_both_splits_load(tmp_path: Path) -> None:
    loaded = load_tasks_file(write(tmp_path, GOOD))
    assert loaded.train[2] == Task("squares", "2", {"question": "2*2"})
    assert [task.id for task in loaded.eval] == ["7"]


def test_eval_tasks_may_be_left_out(tmp_path: Path) -> None:
    assert load_tasks_file(write(tmp_path, GOOD.replace("eval_tasks", "other"))).eval == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def train_tasks", "def training_tasks", "function train_tasks"),
        ("_tasks(range(3))", "[]", "at least one task"),
        ("_tasks(range(3))", "None", r"train_tasks\(\) raised TypeError"),
        ("_tasks(range(3))", "1 / 0", r"train_tasks\(\) raised ZeroDivisionError"),
        ("_tasks(range(3))", "[{'question': 1}]", r"train_tasks\(\)\[0\].*wingbeat\.Task"),
        ("_tasks(range(3))", "_tasks([1, 1])", "'1' twice"),
        ("_tasks(range(3))", "_tasks([7])", "held out"),
        ("_tasks(range(3))", "[Task('', 'x')]", "source and an id"),
        ("_tasks(range(3))", "[Task('s', 'x', {'f': print})]", r"\[0\].*JSON"),
        ("def eval_tasks():\n    yield from _tasks([7])", "eval_tasks = 3", "function eval_tasks"),
    ],
)
def test_faults_are_told_with_their_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=says):
        load_tasks_file(write(tmp_path, GOOD.replace(old, new)))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no such file"):
        load_tasks_file(tmp_path / "tasks.py")
