"""Puzzle families of the reasoning-gym library (``tasks.environment = "reasoning-gym:FAMILY"``).

The library generates tasks and scores answers; this adapter keeps three promises that it does not:

- Held-out questions never occur in training.  Both splits are cut from one stream of items, the
  held-out ones first (so that ``size`` does not change them), and equal questions are dropped.
- A score says something.  Families whose scorer accepts nonsense, rejects its own answer or judges
  otherwise are refused by name, and every family is probed when it is made.
- An answer is data.  Some scorers evaluate the answer as Python; those get only answers made of
  characters that cannot call anything, or the family is refused.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from pydantic import ConfigDict, Field

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.core.types import Split, Task
from wingbeat.environments.kinds import Kind
from wingbeat.environments.options import Options, read_options, read_split
from wingbeat.environments.single_turn import SingleTurn

logger = logging.getLogger("wingbeat.environments")

_NOT_ITS_ANSWER = "its scorer does not give its own answer full marks"
_CODE = "its scorer evaluates the answer as code"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "arc_agi": "its entries do not survive being sent as JSON",
        "boxnet": _NOT_ITS_ANSWER,
        "composite": "it mixes other families; train on those",
        "game_of_life_halting": "its scorer accepts any answer",
        "graph_color": _NOT_ITS_ANSWER,
        "intermediate_integration": _CODE,
        "polynomial_multiplication": _CODE,
        "propositional_logic": _NOT_ITS_ANSWER,
        "puzzle24": "its scorer ignores the given numbers, so that one constant answer solves every task",
        "rearc": "its entries do not survive being sent as JSON",
        "rubiks_cube": _NOT_ITS_ANSWER,
        "rush_hour": _NOT_ITS_ANSWER,
        "simple_integration": _CODE,
    }
)
"""Families that would train the wrong thing, with the reason (found by running 0.1.25)."""

HASH_SEEDED = frozenset({"isomorphic_strings", "ransom_note", "word_ladder"})
"""Families that iterate over sets of strings: their tasks differ between processes unless hashing is fixed."""

ANSWER_PATTERNS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "binary_matrix": re.compile(r"[-0-9\s,\[\]]*"),
        "countdown": re.compile(r"(?!.*\*\s*\*)(?!.*\d{10})[-+*/()\d. ]{0,200}"),
        "n_queens": re.compile(r"[Q_\s,'\"\[\]]*"),
        "spiral_matrix": re.compile(r"[-0-9\s,\[\]]*"),
        "string_insertion": re.compile(r"[A-Za-z\s,'\"\[\]]*"),
    }
)
"""Families whose scorer calls ``eval``: an answer that does not fully match is wrong without being run.

The patterns allow what right answers are made of and neither names with a call nor towers of powers.
"""

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, RecursionError)
"""What scorers raise on an answer they cannot parse: such an answer is wrong, the scorer is not broken."""

_NONSENSE = ("x", "foo bar baz")
_MAX_NONSENSE_SCORE = 0.2
_NUM_PROBED = 3
_MAX_DRAWS_PER_TASK = 10


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str, entry: dict[str, Any]) -> float: ...


class ReasoningGymOptions(Options):
    """How many tasks; every other option goes to the family (for example ``num_terms``)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    size: int = Field(default=1000, ge=1, description="Tasks to train on.")
    eval_size: int = Field(default=100, ge=1, description="Held-out tasks.")
    seed: int = Field(default=0, ge=0, description="Seeds the generator.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of an answer; unset: what the policy allows."
    )


class ReasoningGymEnvironment(SingleTurn):
    """One family.  A payload holds the ``question`` and the library's ``entry`` that scoring needs."""

    def __init__(self, family: str, options: Mapping[str, Any] | None = None) -> None:
        self.name = f"reasoning-gym:{family}"
        self._family = family
        read = read_options(ReasoningGymOptions, options or {}, environment=self.name)
        self.max_tokens = read.max_tokens
        self._dataset = _make_dataset(family, read)
        self._tasks = self._make_tasks(read)
        self._probe(self._tasks[Split.EVAL][:_NUM_PROBED])

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks with distinct questions; no question is in both splits."""
        return self._tasks[read_split(split)]

    def score(self, task: Task, answer: str) -> float:
        """The library's score from 0 to 1 of an answer without surrounding white space.

        An answer that the scorer cannot read scores 0.  Raises ValueError if the score is no finite
        number, which is the library's fault and no reward.
        """
        answer = answer.strip()
        pattern = ANSWER_PATTERNS.get(self._family)
        if not answer or (pattern is not None and pattern.fullmatch(answer) is None):
            return 0.0
        try:
            score = float(self._dataset.score_answer(answer, task.payload["entry"]))
        except _UNREADABLE as error:
            logger.debug("%s: unreadable answer %.80r: %s", self.name, answer, error)
            return 0.0
        if not math.isfinite(score):
            raise ValueError(f"{self.name}: expected a score from 0 to 1, got {score} for {answer!r}")
        return score

    def _make_tasks(self, options: ReasoningGymOptions) -> dict[Split, tuple[Task, ...]]:
        wanted = options.eval_size + options.size
        stream = _distinct(self._dataset, _num_draws(options))
        items = [item for _, item in zip(range(wanted), stream, strict=False)]
        if len(items) < wanted:
            raise ConfigError(
                f"{self.name}: expected {options.size} + {options.eval_size} distinct questions, got {len(items)} in "
                f"{_num_draws(options)} draws; lower `size` or `eval_size`, or widen the family's options"
            )
        tasks = [self._task(index, item) for index, item in items]
        return {Split.EVAL: tuple(tasks[: options.eval_size]), Split.TRAIN: tuple(tasks[options.eval_size :])}

    def _task(self, index: int, item: dict[str, Any]) -> Task:
        try:
            entry = json.loads(json.dumps(item, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name} cannot be used: its entries are no JSON data ({error})") from error
        return Task(self.name, f"{self._family}-{index}", {"question": entry["question"], "entry": entry})

    def _probe(self, tasks: Sequence[Task]) -> None:
        """Refuse a family whose scores mean nothing, whatever release of the library is installed."""
        for task in tasks:
            own = self.score(task, str(task.payload["entry"]["answer"]))
            if own < 1.0:
                raise ConfigError(f"{self.name} cannot be used: {_NOT_ITS_ANSWER} (got {own})")
        for nonsense in _NONSENSE:
            if tasks and all(self.score(task, nonsense) > _MAX_NONSENSE_SCORE for task in tasks):
                raise ConfigError(f"{self.name} cannot be used: its scorer accepts the answer {nonsense!r}")


def _num_draws(options: ReasoningGymOptions) -> int:
    return _MAX_DRAWS_PER_TASK * (options.size + options.eval_size)


def _distinct(dataset: _Dataset, num_draws: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index and item of every question's first occurrence."""
    seen: set[str] = set()
    for index in range(num_draws):
        item = dataset[index]
        question = item["question"].strip()
        if question not in seen:
            seen.add(question)
            yield index, item


def _make_dataset(family: str, options: ReasoningGymOptions) -> _Dataset:
    if family in REFUSED:
        raise ConfigError(f"reasoning-gym:{family} cannot be used: {REFUSED[family]}")
    if family in HASH_SEEDED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ConfigError(
            f"reasoning-gym:{family} makes other tasks in every process; set PYTHONHASHSEED=0 in the environment"
        )
    try:
        library: Any = importlib.import_module("reasoning_gym")
        families: Any = importlib.import_module("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            "reasoning-gym is not installed; install it with `pip install 'wingbeat[environments]'`"
        ) from error
    if family not in families:
        known = ", ".join(sorted(set(families) - set(REFUSED)))
        raise ConfigError(f"expected a family of reasoning-gym, got {family!r}; there are: {known}")
    extra = options.model_extra or {}
    try:
        return library.create_dataset(family, size=_num_draws(options), seed=options.seed, **extra)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym:{family} does not take the options {extra}: {error}") from error


def _make(family: str, options: Mapping[str, Any]) -> ReasoningGymEnvironment:
    if not family:
        raise ConfigError("expected a family, as in reasoning-gym:chain_sum, got reasoning-gym alone")
    return ReasoningGymEnvironment(family, options)


KIND = Kind(
    _make,
    summary="about ninety families of puzzles that are made and scored by rules; one question, one answer",
    example="reasoning-gym:spell_backward",
    preset={
        "run": {"steps": 100},
        "policies": {"solver": {"model": "builtin:spell-backward", "context_tokens": 128}},
        "tasks": {"options": {"size": 800, "eval_size": 100, "max_tokens": 8, "min_word_len": 3, "max_word_len": 4}},
    },
)
