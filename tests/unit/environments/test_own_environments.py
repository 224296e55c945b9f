"""A new environment needs nothing of the system changed: ours import public names only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import wingbeat.environments

PUBLIC = {"wingbeat", "wingbeat.environments", "wingbeat.resources", "wingbeat.tools"}
ROOT = Path(wingbeat.environments.__file__).parent


@pytest.mark.parametrize("package", ["code_repair", "retrieval", "game"])
def test_it_imports_public_names_only(package: str) -> None:
    own = f"wingbeat.environments.{package}"
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                is_ours = name.partition(".")[0] == "wingbeat"
                assert not is_ours or name in PUBLIC or f"{name}.".startswith(f"{own}."), f"{path.name}: {name}"
