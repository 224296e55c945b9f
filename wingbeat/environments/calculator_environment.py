"""The calculator tasks behind the environment port: what ``tasks.environment = "calculator"`` means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from wingbeat.client import Episode
from wingbeat.core.types import Split, Task
from wingbeat.environments.calculator.presets import DEMO_PRESET as DEMO
from wingbeat.environments.calculator.tasks import CalculatorTask, make_split, score
from wingbeat.environments.kinds import Kind, without_variant
from wingbeat.environments.options import Options, read_options, read_split


class CalculatorOptions(Options):
    """Which of the tasks are held out."""

    seed: int = Field(default=0, ge=0, description="Draws the split; held-out tasks are never trained on.")


class CalculatorEnvironment:
    """One sum, difference or product of two digits each; the payload holds question, expression and answer."""

    name = "calculator"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        read = read_options(CalculatorOptions, options or {}, environment=self.name)
        train, heldout = make_split(read.seed)
        self._tasks = {Split.TRAIN: tuple(map(to_task, train)), Split.EVAL: tuple(map(to_task, heldout))}

    def tasks(self, split: str) -> Sequence[Task]:
        """195 to train on, 105 held out."""
        return self._tasks[read_split(split)]

    def score(self, task: Task, answer: str) -> float:
        """1 if the answer is exactly right, else 0."""
        return score(from_task(task), answer)

    async def play(self, episode: Episode) -> float:
        """With the calculator as a tool: the agent of ``wingbeat demo``."""
        from wingbeat.environments.calculator.agent import solve  # needs the openai SDK

        return await solve(episode)


def to_task(task: CalculatorTask) -> Task:
    """A calculator task as JSON data."""
    payload = {"question": task.question, "expression": task.expression, "answer": task.answer}
    return Task(CalculatorEnvironment.name, task.id, payload)


def from_task(task: Task) -> CalculatorTask:
    """The calculator task of a payload.  Raises KeyError if it is none."""
    payload = task.payload
    return CalculatorTask(
        id=task.id, question=payload["question"], expression=payload["expression"], answer=payload["answer"]
    )


KIND = Kind(
    without_variant(CalculatorEnvironment.name, CalculatorEnvironment),
    summary="one-digit sums, differences and products, with a calculator as a tool",
    preset={
        "run": {"steps": DEMO.steps},
        "policies": {
            "solver": {
                "model": "builtin:calculator",
                "context_tokens": 256,
                "trainer": {"learning_rate": DEMO.learning_rate, "warmup_steps": DEMO.warmup_steps},
            }
        },
        "eval": {"samples_per_task": 2},
        "agent": {"concurrency": 48},
    },
)
