"""The largest of three digits: 990 questions, 198 of them held out."""

import random
from typing import Any

from wingbeat import Task

NUM_HELD_OUT = 198


def all_tasks() -> list[dict[str, Any]]:
    """Every question with its answer and the wrong answers that are among its numbers."""
    found: list[dict[str, Any]] = []
    for number in range(1000):
        digits = f"{number:03}"
        if len(set(digits)) == 1:
            continue
        answer = max(digits)
        numbers = " ".join(digits)
        wrong = sorted(set(digits) - {answer})
        found.append({"numbers": numbers, "question": f"largest of {numbers}", "answer": answer, "wrong": wrong})
    return found


def train_tasks() -> list[Task]:
    return _split()[NUM_HELD_OUT:]


def eval_tasks() -> list[Task]:
    return _split()[:NUM_HELD_OUT]


def _split() -> list[Task]:
    rng = random.Random(0)
    tasks = all_tasks()
    rng.shuffle(tasks)
    return [
        Task("largest", task["numbers"].replace(" ", ""), {**task, "decoy": rng.choice(task["wrong"])})
        for task in tasks
    ]
