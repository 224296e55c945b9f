"""The tasks: what to train on, and what to measure on.

A task is a source, an id that is unique in it, and a payload of JSON data for your agent.  Keep the
two sets apart: the reward on `eval_tasks` says what was learnt, that on `train_tasks` only what was remembered.
"""

from wingbeat import Task
from wingbeat.environments.calculator import CalculatorTask, make_split

SPLIT_SEED = 0


def train_tasks() -> list[Task]:
    """195 questions such as "what is 3 plus 8 ?"."""
    return [make_task(task) for task in make_split(SPLIT_SEED)[0]]


def eval_tasks() -> list[Task]:
    """105 more, never trained on."""
    return [make_task(task) for task in make_split(SPLIT_SEED)[1]]


def make_task(task: CalculatorTask) -> Task:
    """The payload holds the answer, because the agent scores itself."""
    return Task("calculator", task.id, {"question": task.question, "answer": task.answer})
