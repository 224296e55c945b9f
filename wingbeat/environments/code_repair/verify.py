"""Finds the mutants that are bugs, by running tests: what ``index.json`` holds.

    python -m wingbeat.environments.code_repair.verify        # writes index.json anew

A mutant becomes a task if, and only if, the tests that an agent sees fail with it, at least one hidden case answers
otherwise than without it, and everything ends in time. Programs and mutations are ours, so this runs them
without a sandbox.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wingbeat.environments.code_repair.mutations import KINDS, Mutant, mutants
from wingbeat.environments.code_repair.programs import Program, programs

MAX_PER_KIND = 5
"""Mutants of one kind taken of one program, spread evenly over its modules: kinds stay balanced."""

HERE = Path(__file__).parent


def examine(program: Program, variants: Sequence[Mapping[str, str]]) -> list[dict[str, Any] | None]:
    """Of each variant (path -> changed source) the failing tests and the hidden answers; None if it does not end."""
    request = {
        "files": {**program.modules, **program.tests},
        "hidden": program.hidden,
        "cases": program.cases,
        "variants": variants,
    }
    done = subprocess.run(
        [sys.executable, "-B", "-s", str(HERE / "verify_runner.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def index_of(program: Program) -> dict[str, Any]:
    """A program's entry in the index.  Raises ValueError if the program itself does not pass its tests."""
    places = [(path, mutant) for path, text in program.modules.items() for mutant in mutants(text)]
    original, *found = examine(program, [{}, *({path: mutant.source} for path, mutant in places)])
    if original is None or original["failing"]:
        raise ValueError(f"program {program.name} fails its own tests: {original}")
    expected = original["answers"]
    if broken := [case for case, answer in expected.items() if "broken" in answer]:
        raise ValueError(f"program {program.name}: hidden cases without an answer: {broken}")
    bugs = [
        (path, mutant, seen["failing"])
        for (path, mutant), seen in zip(places, found, strict=True)
        if seen is not None and seen["failing"] and seen["answers"] != expected
    ]
    chosen = [bug for kind in KINDS for bug in spread([bug for bug in bugs if bug[1].kind == kind])]
    return {
        "expected": expected,
        "mutants": [
            {"path": path, "kind": mutant.kind, "number": mutant.number, "failing": failing}
            for path, mutant, failing in chosen
        ],
    }


def spread(bugs: Sequence[tuple[str, Mutant, list[str]]]) -> list[tuple[str, Mutant, list[str]]]:
    """At most ``MAX_PER_KIND``, evenly spaced."""
    count = min(MAX_PER_KIND, len(bugs))
    return [bugs[index * len(bugs) // count] for index in range(count)]


def write_index() -> int:
    """Verify everything and write the file; returns the number of mutants."""
    entries = {name: index_of(program) for name, program in programs().items()}
    lines = [f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in entries.items()]
    (HERE / "index.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return sum(len(entry["mutants"]) for entry in entries.values())


if __name__ == "__main__":
    sys.stdout.write(f"{write_index()} mutants\n")
