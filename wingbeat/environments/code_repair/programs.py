"""The base programs: small packages with unit tests, and hidden cases that say what they must do.

Each is one text of ``programs/``: a line that describes it, then its files, each under a line ``--- PATH``. The last
part, ``--- hidden``, is Python source of functions ``case_*`` that use the package and *return* what they saw. What
they should return is not in it, nor anywhere else that an agent's sandbox ever sees: see :mod:`.judge`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

_PART = re.compile(r"^--- (\S+)\n", re.MULTILINE)
HIDDEN = "hidden"
TESTS = "tests/"


@dataclass(frozen=True, slots=True)
class Program:
    """One package, its tests and its hidden cases."""

    name: str
    """Also of its package, the folder that its modules are in."""
    summary: str
    modules: Mapping[str, str]
    """Path -> source, without bugs."""
    tests: Mapping[str, str]
    """Path -> source of the tests that an agent sees."""
    hidden: str
    """Source of the hidden cases."""

    @property
    def cases(self) -> tuple[str, ...]:
        """Names of the hidden cases, in order."""
        return tuple(re.findall(r"^def (case_\w+)\(", self.hidden, flags=re.MULTILINE))


def parse_program(name: str, text: str) -> Program:
    """A program from its text.  Raises ValueError if a part is missing."""
    summary, *parts = _PART.split(text)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    hidden = found.pop(HIDDEN, "")
    tests = {path: source for path, source in found.items() if path.startswith(TESTS)}
    modules = {path: source for path, source in found.items() if path.startswith(f"{name}/")}
    if not hidden or not tests or not modules or len(tests) + len(modules) != len(found):
        raise ValueError(f"program {name}: expected {name}/*.py, tests/*.py and hidden cases, got {sorted(found)}")
    return Program(name, summary.strip(), MappingProxyType(modules), MappingProxyType(tests), hidden)


@cache
def programs() -> Mapping[str, Program]:
    """All base programs by name, in alphabetical order."""
    folder = files("wingbeat.environments.code_repair").joinpath("programs")
    texts = {path.name.removesuffix(".txt"): path.read_text(encoding="utf-8") for path in folder.iterdir()}
    return MappingProxyType({name: parse_program(name, texts[name]) for name in sorted(texts)})
