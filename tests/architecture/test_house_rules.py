"""House rules that no linter knows: sizes, banned names and where a broad ``except`` may stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "wingbeat"

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 80

BROAD_EXCEPT_ALLOWED = {
    "wingbeat/client/agents.py": "carries whatever an agent raised from its thread to the task that awaits it",
    "wingbeat/dataflow/operators/chain.py": "leaves an operator of a user's that raised out, so that the run goes on",
    "wingbeat/tools/calling.py": "tells the model whatever a tool of a user's raised, but for infrastructure's faults",
    "wingbeat/environments/code_repair/hidden_runner.py": "whatever the code under test raises is its answer",
    "wingbeat/resources/backends/container_threads.py": (
        "carries whatever a client library raised from its thread to the task that awaits it"
    ),
    "wingbeat/server/control.py": "records the failure of any background task, so that the status can name it",
}
"""Module -> why it must survive any error of what it supervises."""

BANNED_IMPORTS = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
BANNED_CALLS = frozenset({"print", "torch.save", "torch.load", "eval", "exec", "os.system"})
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MAY_BE_BROAD = re.compile(r"except\s*:|\b(Base)?Exception\b")
MAY_BE_BANNED = re.compile(rf"\b({'|'.join({name.split('.')[-1] for name in BANNED_IMPORTS | BANNED_CALLS})})\b")
"""What a module must say for the rule to look at its syntax: to walk through all of them takes seconds."""


def module_paths() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def parse(path: Path) -> ast.Module:
    """Not kept: a million objects would be looked through by every later run of the garbage collector."""
    return ast.parse(text_of(path), filename=str(path))


def parsed(word: str | re.Pattern[str]) -> Iterator[tuple[Path, ast.Module]]:
    """The modules in whose text it is found."""
    return ((path, parse(path)) for path in module_paths() if re.search(word, text_of(path)))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute expression, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything and does not end by raising: a bare except, ``Exception`` or ``BaseException``."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    catches_all = any(kind is None or dotted(kind).split(".")[-1] in {"Exception", "BaseException"} for kind in kinds)
    return catches_all and not isinstance(handler.body[-1], ast.Raise)


def broad_excepts(tree: ast.Module) -> Iterator[ast.ExceptHandler]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and is_broad(node))


def banned_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and name of every use of a banned module or function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [(node.module or "").split(".")[0], *(name for name in full if name in BANNED_CALLS)]
        elif isinstance(node, ast.Call) and dotted(node.func) in BANNED_CALLS:
            names = [dotted(node.func)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name in BANNED_IMPORTS | BANNED_CALLS)


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every one, however deep; expressions, in which there is none, are most of a tree and are left out."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        statements = getattr(node, block, ())
        for inner in statements if isinstance(statements, list) else ():
            yield from functions(inner)


def stubs(tree: ast.Module) -> Iterator[ast.Raise]:
    """Every ``raise NotImplementedError``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if dotted(error) == "NotImplementedError":
                yield node


def test_modules_are_short() -> None:
    lengths = {where(path, 1): len(text_of(path).splitlines()) for path in module_paths()}
    long = {name: length for name, length in lengths.items() if length > MAX_MODULE_LINES}
    assert long == {}, f"split these modules (at most {MAX_MODULE_LINES} lines): {long}"


def test_functions_are_short() -> None:
    long = {
        f"{where(path, node.lineno)} {node.name}": length
        for path in module_paths()
        for node in functions(parse(path))
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}, f"split these functions (at most {MAX_FUNCTION_LINES} lines): {long}"


def test_nothing_is_left_unfinished() -> None:
    marks = [
        f"{where(path, number)}: {line.strip()}"
        for path in module_paths()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    marks += [
        f"{where(path, node.lineno)}: raise NotImplementedError"
        for path, tree in parsed("NotImplementedError")
        for node in stubs(tree)
    ]
    assert marks == [], "\n".join(marks)


def test_no_banned_names() -> None:
    """Output goes through the CLI's console or sys.stdout; tensors and states never through pickle."""
    uses = [f"{where(path, line)}: {name}" for path, tree in parsed(MAY_BE_BANNED) for line, name in banned_names(tree)]
    assert uses == [], "\n".join(uses)


def test_broad_excepts_stand_only_in_listed_supervisors() -> None:
    found = {
        str(path.relative_to(ROOT)): [where(path, handler.lineno) for handler in handlers]
        for path, tree in parsed(MAY_BE_BROAD)
        if (handlers := list(broad_excepts(tree)))
    }
    unlisted = {name: places for name, places in found.items() if name not in BROAD_EXCEPT_ALLOWED}
    assert unlisted == {}, f"catch the errors you expect, or list the module with its reason: {unlisted}"
    stale = sorted(set(BROAD_EXCEPT_ALLOWED) - set(found))
    assert stale == [], f"no longer needed in BROAD_EXCEPT_ALLOWED: {stale}"


@pytest.mark.parametrize(
    ("clause", "broad"),
    [
        ("except ValueError:\n    pass", False),
        ("except (ValueError, OSError):\n    pass", False),
        ("except Exception:\n    cleanup()\n    raise", False),
        ("except Exception as error:\n    raise ValueError from error", False),
        ("except Exception:\n    pass", True),
        ("except BaseException as error:\n    log(error)", True),
        ("except (ValueError, Exception):\n    pass", True),
        ("except builtins.Exception:\n    pass", True),
        ("except:\n    pass", True),
    ],
)
def test_broad_except_rule_on_examples(clause: str, broad: bool) -> None:
    assert bool(list(broad_excepts(ast.parse(f"try:\n    work()\n{clause}\n")))) is broad
    assert not broad or MAY_BE_BROAD.search(clause)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import pickle", ["pickle"]),
        ("from cloudpickle import dumps", ["cloudpickle"]),
        ("from torch import load", []),
        ("from torch import save, nn", []),
        ("torch.load(path)", ["torch.load"]),
        ("print('x')", ["print"]),
        ("console.print('x')", []),
        ("model.eval()", []),
    ],
)
def test_banned_names_rule_on_examples(source: str, names: list[str]) -> None:
    found = [name for _, name in banned_names(ast.parse(source))]
    expected = names or [f"torch.{n}" for n in ("load", "save") if f"import {n}" in source]
    assert found == expected
    assert not found or MAY_BE_BANNED.search(source)


def test_functions_are_found_wherever_a_statement_may_stand() -> None:
    holders = (
        "class C:", "if x:", "if x:\n pass\nelif x:", "if x:\n pass\nelse:", "for x in y:", "while x:", "with x:",
        "for x in y:\n pass\nelse:", "try:\n pass\nexcept E:", "try:\n pass\nexcept* E:", "try:\n pass\nfinally:",
        "try:\n pass\nexcept E:\n pass\nelse:", "match x:\n case 1:", "async def f():", "def f():",
    )  # fmt: skip
    for holder in holders:
        tree = ast.parse(f"{holder}\n  async def inner():\n   def innermost(): lambda: 0\n")
        assert [node.name for node in functions(tree)][-2:] == ["inner", "innermost"], holder
