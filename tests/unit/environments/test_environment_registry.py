"""Environments by name, and what they promise: JSON payloads, disjoint splits, honest scores."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import ConfigError, DependencyMissing
from wingbeat.core.ports import Environment
from wingbeat.core.types import Task
from wingbeat.environments import environment_names, make_environment
from wingbeat.environments.reasoning_gym import ANSWER_PATTERNS, REFUSED

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

SMALL = {"size": 8, "eval_size": 4}


def through_json(task: Task) -> Task:
    return Task(task.source, task.id, json.loads(json.dumps(task.payload)))


def check_promises(environment: Environment) -> None:
    assert isinstance(environment, Environment)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert train and held_out
    assert not {t.payload["question"] for t in train} & {t.payload["question"] for t in held_out}
    assert len({t.id for t in [*train, *held_out]}) == len(train) + len(held_out)
    assert [through_json(task) for task in train] == list(train)
    with pytest.raises(ConfigError, match="train or eval"):
        environment.tasks("test")


def test_names() -> None:
    assert {"calculator", "gymnasium", "reasoning-gym", "textarena", "verifiers"} <= set(environment_names())
    with pytest.raises(ConfigError, match="did you mean calculator"):
        make_environment("calculater")


def test_calculator() -> None:
    environment = make_environment("calculator", {"seed": 3})
    check_promises(environment)
    assert (len(environment.tasks("train")), len(environment.tasks("eval"))) == (195, 105)
    task = through_json(environment.tasks("train")[0])
    assert environment.score(task, f" {task.payload['answer']}\n") == 1.0
    assert environment.score(task, "seven") == 0.0
    assert make_environment("calculator", {"seed": 3}).tasks("eval") == environment.tasks("eval")
    assert make_environment("calculator", {"seed": 4}).tasks("eval") != environment.tasks("eval")


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("calculator:hard", {}, "calculator:hard"),
        ("calculator", {"sed": 1}, r"tasks\.options\.sed.*known options: seed"),
        ("calculator", {"seed": -1}, "seed"),
        ("reasoning-gym", {}, "chain_sum"),
    ],
)
def test_wrong_specs_and_options(spec: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_environment(spec, options)


def test_a_missing_library_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from wingbeat.environments import make_environment\n"
        "from wingbeat.core.errors import DependencyMissing\n"
        "try: make_environment('reasoning-gym:chain_sum')\n"
        "except DependencyMissing as error: sys.stdout.write(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'wingbeat[environments]'" in done.stdout
    assert issubclass(DependencyMissing, ValueError)


# --- reasoning-gym, where the extra is installed


@pytest.fixture(scope="module")
def gym() -> Any:
    return pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("family", ["chain_sum", "spell_backward", "letter_counting", "prime_factorization"])
def test_reasoning_gym(gym: Any, family: str) -> None:
    environment = make_environment(f"reasoning-gym:{family}", SMALL)
    check_promises(environment)
    assert (len(environment.tasks("train")), len(environment.tasks("eval"))) == (8, 4)
    for task in map(through_json, environment.tasks("train")):
        assert environment.score(task, f"  {task.payload['entry']['answer']}\n") == 1.0
        assert environment.score(task, "#") <= 0.2
        assert environment.score(task, "") == 0.0


def test_family_options_reach_the_family(gym: Any) -> None:
    options = {**SMALL, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = make_environment("reasoning-gym:chain_sum", options)
    assert all(task.payload["entry"]["metadata"]["num_terms"] == 2 for task in environment.tasks("train"))
    with pytest.raises(ConfigError, match="min_trems"):
        make_environment("reasoning-gym:chain_sum", {**SMALL, "min_trems": 2})


def test_held_out_tasks_depend_on_the_seed_only(gym: Any) -> None:
    few, many = (make_environment("reasoning-gym:chain_sum", {"size": n, "eval_size": 4}) for n in (4, 40))
    assert few.tasks("eval") == many.tasks("eval")
    other = make_environment("reasoning-gym:chain_sum", {**SMALL, "seed": 10_000})
    assert few.tasks("eval") != other.tasks("eval")


def test_too_few_distinct_questions_are_told(gym: Any) -> None:
    options = {"size": 500, "eval_size": 4, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ConfigError, match="distinct questions"):
        make_environment("reasoning-gym:chain_sum", options)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_traps_are_refused_by_name(gym: Any, family: str) -> None:
    with pytest.raises(ConfigError, match=family):
        make_environment(f"reasoning-gym:{family}", SMALL)


def test_the_probe_finds_traps_that_no_list_knows(gym: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wingbeat.environments.reasoning_gym.REFUSED", {})
    with pytest.raises(ConfigError, match="accepts the answer"):
        make_environment("reasoning-gym:game_of_life_halting", SMALL)
    with pytest.raises(ConfigError, match="its own answer"):
        make_environment("reasoning-gym:rush_hour", SMALL)


def test_unstable_families_need_fixed_hashing(gym: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        make_environment("reasoning-gym:word_ladder", SMALL)


def test_unknown_family(gym: Any) -> None:
    with pytest.raises(ConfigError, match="chain_sum"):
        make_environment("reasoning-gym:chainsum", SMALL)


ATTACKS = [
    "__import__('os').system('true')",
    "open('x')",
    "exit()",
    "[exit() for x in [1]]",
    "().__class__",
    "9**9**9**9",
    "9* *9",
    "lambda: 1",
    "'a'*9999999999",
]


@pytest.mark.parametrize("family", sorted(ANSWER_PATTERNS))
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_answer_can_call_anything(family: str, attack: str) -> None:
    assert ANSWER_PATTERNS[family].fullmatch(attack) is None


@given(st.text(alphabet="abAB_.()[]{}'\"*+-/0129 ,:=@\n", max_size=30))
def test_patterns_never_let_a_name_be_called(answer: str) -> None:
    for pattern in ANSWER_PATTERNS.values():
        if pattern.fullmatch(answer):
            assert "(" not in answer or not any(character.isalpha() or character == "_" for character in answer)
            assert "**" not in answer


@pytest.mark.parametrize("family", sorted(ANSWER_PATTERNS))
def test_guarded_families_still_take_their_answers(gym: Any, family: str) -> None:
    environment = make_environment(f"reasoning-gym:{family}", SMALL)
    for task in environment.tasks("train"):
        assert environment.score(task, task.payload["entry"]["answer"]) == 1.0
        assert environment.score(task, ATTACKS[0]) == 0.0
