"""Noisy demonstrations: what the demo's model imitates before reinforcement.

A model with random weights never earns a reward, so it first imitates a careless agent. The agent
makes three kinds of mistake, each independent of the question: it guesses instead of calling the
tool, it passes an unrelated expression, it reports an unrelated number. Imitation can therefore
only reach the careless agent's own reward (`CarelessAgent.expected_reward`, about one in four);
whatever the model gains beyond that, it gained by reinforcement.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from wingbeat.environments.calculator.tasks import CalculatorTask, all_tasks, calc

Message = dict[str, Any]

_ALL_TASKS = all_tasks()


@dataclass(frozen=True, slots=True)
class CarelessAgent:
    """How often the demonstrating agent does each thing right; mistakes are independent."""

    call_rate: float = 0.5
    """It calls the tool; else it answers at once with a random number."""

    expression_rate: float = 0.8
    """Its call asks what the user asked; else an unrelated expression of one- and two-digit numbers."""

    report_rate: float = 0.7
    """It reports what the tool returned; else a random number."""

    @property
    def expected_reward(self) -> float:
        """Its mean reward, leaving out lucky guesses (about one in thirty mistakes)."""
        return self.call_rate * self.expression_rate * self.report_rate

    def demonstrate(self, task: CalculatorTask, rng: random.Random) -> list[Message]:
        """One episode's messages, beginning with the question and ending with an answer."""
        question: Message = {"role": "user", "content": task.question}
        if rng.random() >= self.call_rate:
            return [question, _answer(rng.choice(_ALL_TASKS).answer)]
        copied = rng.random() < self.expression_rate
        expression = task.expression if copied else _unrelated_expression(rng)
        observation = calc(expression)
        reported = rng.random() < self.report_rate
        answer = observation if reported else rng.choice(_ALL_TASKS).answer
        return [question, _call(expression), tool_message(observation), _answer(answer)]


def _unrelated_expression(rng: random.Random) -> str:
    """Numbers beyond the tasks' digits: their results make copying a skill rather than a table."""
    left, right = (rng.randrange(10 ** rng.choice((1, 2))) for _ in range(2))
    return f"{left}{rng.choice('+-*')}{right}"


def tool_message(observation: str) -> Message:
    """The tool's result as a message."""
    return {"role": "tool", "tool_call_id": "call", "content": observation}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(expression: str) -> Message:
    function = {"name": "calc", "arguments": json.dumps({"expression": expression})}
    call = {"id": "call", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
