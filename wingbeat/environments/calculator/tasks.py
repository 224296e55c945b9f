"""The calculator tasks, their tool and their score: everything a client needs, without torch.

A task asks for one sum, difference or product of two digits. There are only 300 of them, so the
split is by task: no held-out question is ever trained on, and a policy scores on it only if it has
learned to call the tool and to report the tool's result.
"""

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

OPERATORS: Mapping[str, str] = MappingProxyType({"plus": "+", "minus": "-", "times": "*"})
"""The word a question uses for an operation -> the symbol that `calc` expects."""

NUM_HELDOUT_PER_OPERATOR = 35
"""Held out from each operation's 100 tasks: the same mix on both sides, 195 tasks to train on."""

MAX_EXPRESSION_CHARS = 64
"""Bounds the evaluator's time and recursion, whatever a policy samples."""

MAX_ABS_VALUE = 10**12
"""Bounds the length of an observation; far above anything that a task needs."""

CALC_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate an integer expression with +, -, * and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "The expression to evaluate, for example 3+8.",
                    "maxLength": MAX_EXPRESSION_CHARS,
                }
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
"""The tool as the OpenAI API's `tools` field wants it."""

_EXPRESSION = re.compile(r"[0-9+\-*() ]+")
_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
)


@dataclass(frozen=True, slots=True)
class CalculatorTask:
    """One question; `expression` is what an ideal agent passes to the tool."""

    id: str
    question: str
    expression: str
    answer: str


def all_tasks() -> tuple[CalculatorTask, ...]:
    """Every task, in a fixed order: operation, then left and right digit."""
    return tuple(_task(word, left, right) for word in OPERATORS for left in range(10) for right in range(10))


def make_split(seed: int) -> tuple[tuple[CalculatorTask, ...], tuple[CalculatorTask, ...]]:
    """Return (train, held-out) tasks: disjoint, together all tasks, the same for the same seed."""
    rng = random.Random(seed)
    train: list[CalculatorTask] = []
    heldout: list[CalculatorTask] = []
    tasks = all_tasks()
    for start in range(0, len(tasks), 100):
        block = list(tasks[start : start + 100])
        rng.shuffle(block)
        heldout += block[:NUM_HELDOUT_PER_OPERATOR]
        train += block[NUM_HELDOUT_PER_OPERATOR:]
    rng.shuffle(train)
    return tuple(train), tuple(heldout)


def calc(expression: str) -> str:
    """Evaluate an integer expression: the tool's implementation.

    Policies sample anything, so this accepts only digits, `+ - * ( )` and spaces and never
    evaluates Python.

    Raises:
        ValueError: the expression is malformed or too large. The message is written for the policy
            to read as its observation.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"expected at most {MAX_EXPRESSION_CHARS} characters")
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError("expected only digits, + - * ( ) and spaces")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError("expected an expression like 3+8") from error
    return str(_evaluate(tree.body))


def score(task: CalculatorTask, answer_text: str) -> float:
    """The reward of a final answer: 1 if it is exactly right, else 0.

    There is no partial credit on purpose: policies lock on to a half reward.
    """
    return 1.0 if answer_text.strip() == task.answer else 0.0


def best_constant(tasks: Sequence[CalculatorTask]) -> tuple[str, float]:
    """The single answer that scores highest if given to every task, and its mean score.

    A trained policy means something only relative to this: it is what ignoring the question earns.
    """
    if not tasks:
        raise ValueError("expected at least one task, got none")
    answer, count = min(Counter(task.answer for task in tasks).items(), key=lambda item: (-item[1], item[0]))
    return answer, count / len(tasks)


def _task(word: str, left: int, right: int) -> CalculatorTask:
    expression = f"{left}{OPERATORS[word]}{right}"
    return CalculatorTask(
        id=f"calculator/{left}-{word}-{right}",
        question=f"what is {left} {word} {right} ?",
        expression=expression,
        answer=calc(expression),
    )


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("expected only +, - and * between integers")
    if abs(result) > MAX_ABS_VALUE:
        raise ValueError(f"expected a result within {MAX_ABS_VALUE}")
    return result
