"""One-digit arithmetic with a calculator tool: the task of `wingbeat demo`.

Small enough that a 130,000-parameter model learns it by reinforcement in about a minute on two CPU
cores, and still a whole agent task: several turns, a tool, an exact-match reward, held-out tasks.
Importing this package loads no torch; `calculator.model` does.
"""

from wingbeat.environments.calculator.presets import DEMO_PRESET, DemoPreset
from wingbeat.environments.calculator.tasks import (
    CALC_TOOL,
    CalculatorTask,
    all_tasks,
    best_constant,
    calc,
    make_split,
    score,
)

__all__ = [
    "CALC_TOOL",
    "DEMO_PRESET",
    "CalculatorTask",
    "DemoPreset",
    "all_tasks",
    "best_constant",
    "calc",
    "make_split",
    "score",
]
