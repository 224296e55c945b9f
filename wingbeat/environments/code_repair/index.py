"""The verified mutants and the right answers of the hidden cases: ``index.json``, which :mod:`.verify` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from wingbeat.environments.code_repair.mutations import mutants
from wingbeat.environments.code_repair.programs import programs


@dataclass(frozen=True, slots=True)
class Bug:
    """One verified mutant of one program."""

    program: str
    path: str
    """Of the module that it is in."""
    kind: str
    number: int
    failing: tuple[str, ...]
    """The visible tests that it breaks."""

    @property
    def id(self) -> str:
        module = self.path.rpartition("/")[2].removesuffix(".py")
        return f"{self.program}/{module}/{self.kind}/{self.number}"

    def source(self) -> str:
        """The module with the bug."""
        return _mutated(self.program, self.path)[self.kind, self.number]


@cache
def all_bugs() -> tuple[Bug, ...]:
    """Every bug, program by program."""
    return tuple(
        Bug(name, bug["path"], bug["kind"], bug["number"], tuple(bug["failing"]))
        for name, entry in _index().items()
        for bug in entry["mutants"]
    )


def expected_answers(program: str) -> Mapping[str, Any]:
    """What each hidden case of a program answers when the program is right."""
    return _index()[program]["expected"]


@cache
def _index() -> Mapping[str, Any]:
    text = files("wingbeat.environments.code_repair").joinpath("index.json").read_text(encoding="utf-8")
    return json.loads(text)


@cache
def _mutated(program: str, path: str) -> Mapping[tuple[str, int], str]:
    return {(mutant.kind, mutant.number): mutant.source for mutant in mutants(programs()[program].modules[path])}
