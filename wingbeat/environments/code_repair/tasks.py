"""Tasks: one bug each, split so that what is held out was never trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from wingbeat import Task
from wingbeat.environments.code_repair.index import Bug, all_bugs
from wingbeat.environments.code_repair.programs import Program, programs

SOURCE = "code-repair"
HELD_OUT = 4
"""One in so many is held out."""
TEST_COMMAND = "python3 -m unittest discover -s tests"


def split_bugs(bugs: Sequence[Bug], *, seed: int, held_out: str) -> tuple[list[Bug], list[Bug]]:
    """Bugs to train on, and held-out ones.

    ``held_out`` says what a held-out task shares with training: ``pairs`` holds out a quarter of each program's kinds
    of bugs, so that the program is known and this mistake in it is not; ``programs`` holds out whole programs.
    """
    rng = random.Random(seed)
    names = sorted({bug.program for bug in bugs})
    if held_out == "programs":
        away = {(name, bug.kind) for name in _part(names, rng) for bug in bugs if bug.program == name}
    else:
        kinds = {name: sorted({bug.kind for bug in bugs if bug.program == name}) for name in names}
        away = {(name, kind) for name in names for kind in _part(kinds[name], rng)}
    train = [bug for bug in bugs if (bug.program, bug.kind) not in away]
    heldout = [bug for bug in bugs if (bug.program, bug.kind) in away]
    rng.shuffle(train)
    rng.shuffle(heldout)
    return train, heldout


def chosen_bugs(names: Sequence[str] | None, kinds: Sequence[str] | None) -> list[Bug]:
    """Those of some programs and kinds; None: of all."""
    return [
        bug for bug in all_bugs() if (names is None or bug.program in names) and (kinds is None or bug.kind in kinds)
    ]


def to_task(bug: Bug) -> Task:
    """A bug as JSON data: everything that an agent sees, and nothing of how it is scored."""
    program = programs()[bug.program]
    payload: dict[str, Any] = {
        "question": question(program, bug),
        "program": program.name,
        "files": repository(program, bug),
    }
    return Task(SOURCE, bug.id, payload)


def repository(program: Program, bug: Bug) -> dict[str, str]:
    """Path -> text of what the agent finds."""
    readme = f"# {program.name}\n\n{program.summary}\n\n    {TEST_COMMAND}\n"
    package = {f"{program.name}/__init__.py": f'"""{program.summary}"""\n'}
    return {"README.md": readme, **package, **program.modules, bug.path: bug.source(), **program.tests}


def question(program: Program, bug: Bug) -> str:
    """What the agent is asked."""
    failing = "".join(f"- {name}\n" for name in bug.failing)
    modules = "".join(f"- {path}\n" for path in program.modules)
    return (
        "The folder you work in is a small Python repository. Its tests fail:\n"
        f"{failing}One of these modules has a bug:\n{modules}"
        f"Find it and repair it. Do not change the tests; run them with `{TEST_COMMAND}`. "
        "When the package is right, answer without calling a tool. Other tests, which you cannot see, decide."
    )


def _part(items: Sequence[str], rng: random.Random) -> list[str]:
    """A quarter of the items, at least one of two."""
    return rng.sample(list(items), max(1, len(items) // HELD_OUT)) if len(items) > 1 else []
