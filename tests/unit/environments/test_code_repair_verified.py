"""Every task is what it says: its tests fail with the bug and pass without it, and so do the hidden cases."""

from __future__ import annotations

import pytest

from wingbeat.environments.code_repair.index import all_bugs, expected_answers
from wingbeat.environments.code_repair.programs import programs
from wingbeat.environments.code_repair.verify import examine

pytestmark = pytest.mark.slow  # runs 525 repositories


@pytest.mark.parametrize("name", programs())
def test_every_bug_of_a_program_is_one(name: str) -> None:
    program = programs()[name]
    bugs = [bug for bug in all_bugs() if bug.program == name]
    fixed, *broken = examine(program, [{}, *({bug.path: bug.source()} for bug in bugs)])
    expected = expected_answers(name)
    assert fixed == {"failing": [], "answers": expected}
    for bug, seen in zip(bugs, broken, strict=True):
        assert seen is not None, f"{bug.id} does not end"
        assert tuple(seen["failing"]) == bug.failing, bug.id
        assert seen["answers"] != expected, f"{bug.id}: no hidden case sees it"
