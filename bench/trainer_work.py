"""The work of the trainer benchmark: batches of tokens for steps alone, and one single-turn task for whole training.

The task: after a question of random characters, write vowels.  A reply earns the vowels in it, over the tokens it may
have: from random weights that is learnt within some tens of steps, nobody needs a model or a data set, and both
systems score a reply by its text alone.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.team_work import ALPHABET, Work, write_model
from bench.training import VOCABULARY
from wingbeat.core.types import Task

VOWELS = frozenset("aeiou")
POLICY, SOURCE = "writer", "vowels"
Lengths = Literal["long-tailed", "equal"]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One batch of GRPO groups, as tokens."""

    name: str
    lengths: Lengths
    groups: int = 4
    group_size: int = 8
    prompt: tuple[int, int] = (64, 256)
    """Tokens, uniform; of ``equal``: the mean for all."""
    completion: float = 64.0
    """Median tokens, log-normal; of ``equal``: of all."""
    spread: float = 0.8
    longest: int = 384

    def describe(self) -> str:
        drawn = f"{self.completion:.0f} tokens each" if self.lengths == "equal" else f"median {self.completion:.0f}"
        return f"{self.groups} groups of {self.group_size}, prompts of {self.prompt} tokens, completions {drawn}"


def make_groups(shape: BatchShape, *, seed: int) -> list[dict[str, Any]]:
    """Prompt, completions and rewards of each group; every group has something to learn."""
    rng = random.Random(f"{seed}:{shape.name}")
    groups: list[dict[str, Any]] = []
    for _ in range(shape.groups):
        if shape.lengths == "equal":
            prompt, counts = sum(shape.prompt) // 2, [round(shape.completion)] * shape.group_size
        else:
            prompt = rng.randint(*shape.prompt)
            drawn = (shape.completion * math.exp(rng.gauss(0, shape.spread)) for _ in range(shape.group_size))
            counts = [max(4, min(shape.longest, round(count))) for count in drawn]
        groups.append(
            {
                "prompt": _tokens(rng, prompt),
                "completions": [_tokens(rng, count) for count in counts],
                "rewards": [float(member % 2) for member in range(shape.group_size)],
            }
        )
    return groups


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, VOCABULARY - 8) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class TaskShape:
    """Whole training on the task."""

    steps: int = 20
    groups_per_step: int = 8
    group_size: int = 8
    question: int = 128
    """Characters, which are tokens."""
    max_tokens: int = 64
    hidden: int = 256
    layers: int = 4
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    clip: tuple[float, float] = (0.5, 2.0)
    """Ratios are clipped at 1 - low and 1 + high, in both systems.  On-policy, as TRL is here, none ever gets there;
    at a staleness of one version the usual 0.2 would take the gradient of many tokens."""
    max_staleness: int = 1
    target: float = 0.5
    """Reward, mean of three steps, whose time counts."""

    def describe(self) -> str:
        return (
            f"{self.steps} steps of {self.groups_per_step} groups of {self.group_size}, questions of {self.question} "
            f"and replies of at most {self.max_tokens} tokens, a Qwen3 of {self.layers} layers and hidden size "
            f"{self.hidden}, GRPO without KL, AdamW at {self.learning_rate}"
        )


def questions(shape: TaskShape, *, seed: int, extra: int) -> list[str]:
    """One per group of the run, and ``extra`` more, for groups that are begun and not trained."""
    rng = random.Random(f"vowels:{seed}")
    count = shape.steps * shape.groups_per_step + extra
    return ["".join(rng.choice(ALPHABET[:-3]) for _ in range(shape.question)) for _ in range(count)]


def task_model(folder: Path, shape: TaskShape, *, seed: int) -> Path:
    """Random weights, a token per character."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_model(folder, Work(hidden=shape.hidden, layers=shape.layers), seed=seed)


def tasks(shape: TaskShape, texts: Sequence[str]) -> list[Task]:
    payload = {"max_tokens": shape.max_tokens}
    return [Task(SOURCE, f"q{index}", {"question": text, **payload}) for index, text in enumerate(texts)]


def write_job(path: Path, **facts: Any) -> Path:
    path.write_text(json.dumps(facts), encoding="utf-8")
    return path
