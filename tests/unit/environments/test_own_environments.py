"""A new environment needs nothing of the system changed: ours import public names only."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import wingbeat.environments

PUBLIC = {"wingbeat", "wingbeat.environments", "wingbeat.resources", "wingbeat.tools"}
ROOT = Path(wingbeat.environments.__file__).parent


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file imports; the name is "" where it is the module itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import leads out of its package unseen"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


@pytest.mark.parametrize("package", ["code_repair", "retrieval", "game"])
def test_it_imports_public_names_only(package: str) -> None:
    own = f"wingbeat.environments.{package}."
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for module, name in imported(path):
            if module.partition(".")[0] != "wingbeat" or f"{module}.".startswith(own):
                continue
            assert module in PUBLIC, f"{path.name}: {module}"
            assert name in importlib.import_module(module).__all__, f"{path.name}: {module} does not offer {name!r}"
