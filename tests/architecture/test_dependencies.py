"""What the code imports is what pyproject.toml declares, and the reverse; constraints.txt pins all of it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]

PART_OF = {"pydantic_core": "pydantic", "starlette": "fastapi"}
"""Import name -> the declared library that it belongs to and is pinned by."""

LOADED_BY_OTHERS = {
    "gguf": "transformers reads GGUF files with it",
    "httptools": "uvicorn parses HTTP with it",
    "websockets": "uvicorn speaks WebSocket with it",
}
"""Declared, but not imported by us -> who needs it."""


def normal(name: str) -> str:
    """The distribution name of a requirement line, as indexes compare them."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", name.strip(), maxsplit=1)[0]).lower()


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    names: list[str] = project["dependencies"] + [name for extra in extras for name in optional[extra]]
    return {normal(name) for name in names}


def called(function: ast.expr) -> str:
    """``c`` of ``a.b.c`` and of ``c``, "" of what has no name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@cache
def imported() -> dict[str, str]:
    """Top-level import names of other libraries -> one module that imports each."""
    names: dict[str, str] = {}
    for path in sorted((ROOT / "wingbeat").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and called(node.func) in {"import_module", "find_spec"}:
                roots = [str(a.value).split(".")[0] for a in node.args[:1] if isinstance(a, ast.Constant)]
            else:
                continue
            names |= {root: str(path.relative_to(ROOT)) for root in roots}
    ours = {"wingbeat", *sys.stdlib_module_names}
    return {name: path for name, path in names.items() if name not in ours}


@cache
def installed() -> Mapping[str, list[str]]:
    """Import name -> distributions that bring it (reads all installed metadata, hence once)."""
    return packages_distributions()


def distribution_of(import_name: str) -> str:
    candidates = installed().get(import_name, [import_name])
    return normal(PART_OF.get(import_name, candidates[0]))


def test_every_imported_library_is_declared() -> None:
    known = declared("server", "environments", "export", "ray", "docker", "kubernetes", "mcp", "vllm")
    missing = {name: path for name, path in imported().items() if distribution_of(name) not in known}
    assert missing == {}, f"declare in pyproject.toml (import name -> importer): {missing}"


def test_every_declared_library_is_used() -> None:
    used = {distribution_of(name) for name in imported()} | set(LOADED_BY_OTHERS)
    unused = declared("server", "environments", "export", "ray", "docker", "kubernetes", "mcp", "vllm") - used
    assert unused == set(), f"remove from pyproject.toml: {sorted(unused)}"


def test_constraints_pin_every_declared_library() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {normal(line) for line in lines if "==" in line}
    assert declared("server", "environments", "export", "ray", "docker", "kubernetes", "mcp", "dev") <= pins
    assert not [line for line in lines if "+" in line], "a local build tag cannot be installed from an index"
