"""The import ranks: who may know whom, and who must stay free of torch.

A package imports only packages of lower rank (so packages of one rank never meet), and the control
side never loads torch.  Every import counts, also one inside a function or under ``TYPE_CHECKING``:
knowing a name is depending on it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "wingbeat"

RANKS = {
    "core": 0,
    "tracking": 1,
    "dataflow": 1,
    "scheduler": 1,
    "trainer": 1,
    "engines": 1,
    "weights": 1,
    "resources": 1,
    "client": 1,
    "tools": 2,
    "workers": 2,
    "environments": 3,
    "server": 3,
    "deploy": 4,
    "research": 4,
    "dashboard": 4,
    "cli": 5,
}
ROOT_MAY_EXPORT = ("core", "client", "tools")
"""What ``wingbeat/__init__.py`` may import; its exports count as the client's."""

HEAVY = frozenset({"torch", "transformers", "peft", "vllm", "ray"})
NEVER_HEAVY = ("core", "tracking", "dataflow", "scheduler", "client", "tools", "server", "dashboard")
"""No heavy import anywhere in these, not even a lazy one."""
LAZILY_HEAVY = ("", "resources", "deploy", "cli")
"""A heavy import inside a function at most ("" is the root module)."""
LOADS_LIGHT = (*NEVER_HEAVY, "resources", "deploy", "cli")
"""Loading any module of these loads nothing heavy, directly or through others."""
OF_RAY = "wingbeat.deploy.ray."
"""What runs on a Ray cluster may load ray, and nobody loads it but a command that asks for Ray."""
SERVER_EXTRA = HEAVY | {
    "fastapi",
    "jinja2",
    "jsonschema",
    "matplotlib",
    "mcp",
    "msgspec",
    "numpy",
    "openai",
    "tokenizers",
    "uvicorn",
    "zstandard",
}
"""Not there after ``pip install wingbeat``, the light client."""
LIGHT_MODULES = ("wingbeat", "wingbeat.client", "wingbeat.core.config", "wingbeat.tools", "wingbeat.cli.main")
MAX_LIGHT_IMPORT_S = 0.5


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, as an absolute dotted path."""

    path: Path
    line: int
    name: str
    top_level: bool
    """Runs when the module is loaded."""

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.name}"


def module_paths() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, source: str) -> Iterator[Import]:
    """Every import statement of a module; ``from a import b`` gives ``a.b``, relative ones are resolved."""
    tree = ast.parse(source, filename=str(path))
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    package = module_name(path).split(".") if path.stem == "__init__" else module_name(path).split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = ""
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) + 1 - node.level] if node.level else []
                prefix = "".join(f"{part}." for part in [*base, node.module] if part)
            for alias in node.names:
                yield Import(path, node.lineno, prefix + alias.name, id(node) not in lazy)


def package_of(dotted: str) -> str:
    """The ranked package a dotted name belongs to ("" for other libraries; root exports are the client's)."""
    parts = dotted.split(".")
    if parts[0] != "wingbeat":
        return ""
    if len(parts) > 1 and (parts[1] in RANKS or (PACKAGE / parts[1]).is_dir()):
        return parts[1]
    return "core" if parts[1:] in ([], ["__version__"]) else "client"


def rank_fault(found: Import, importer: str) -> str:
    """Why an import breaks the ranks ("" if it does not); ``importer`` is "" for the root module."""
    target = package_of(found.name)
    if not target or target == importer:
        return ""
    if not importer:
        return "" if target in ROOT_MAY_EXPORT else f"{found}: the root exports only {', '.join(ROOT_MAY_EXPORT)}"
    if RANKS[target] < RANKS[importer]:
        return ""
    return f"{found}: {importer} (rank {RANKS[importer]}) may not import {target} (rank {RANKS[target]})"


def importer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@cache
def all_imports() -> list[Import]:
    return [found for path in module_paths() for found in imports_of(path, path.read_text(encoding="utf-8"))]


def is_heavy(found: Import) -> bool:
    return found.name.split(".")[0] in HEAVY


def may_load_ray(found: Import) -> bool:
    return found.name.split(".")[0] == "ray" and found.path.parent == PACKAGE / "deploy" / "ray"


def test_what_loads_ray_is_loaded_by_its_command_alone_and_in_a_function() -> None:
    importers = {
        (str(found.path.relative_to(PACKAGE)), found.top_level)
        for found in all_imports()
        if found.name.startswith(OF_RAY) and found.path.parent != PACKAGE / "deploy" / "ray"
    }
    assert importers == {("cli/deploy.py", False)}


def test_every_package_has_a_rank() -> None:
    packages = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/**/*.py")}
    assert packages <= set(RANKS), f"give these a rank here and in docs/architecture.md: {packages - set(RANKS)}"


def test_imports_point_to_lower_ranks_only() -> None:
    faults = [fault for found in all_imports() if (fault := rank_fault(found, importer_of(found.path)))]
    assert faults == [], "\n".join(faults)


def test_control_side_never_imports_heavy_libraries() -> None:
    faults = [str(found) for found in all_imports() if importer_of(found.path) in NEVER_HEAVY and is_heavy(found)]
    assert faults == [], "\n".join(faults)


def test_lazy_packages_import_heavy_libraries_only_in_functions() -> None:
    candidates = [found for found in all_imports() if importer_of(found.path) in LAZILY_HEAVY and is_heavy(found)]
    faults = [str(found) for found in candidates if found.top_level and not may_load_ray(found)]
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source", "faulty"),
    [
        ("tracking/a.py", "import wingbeat.core.types", False),
        ("tracking/a.py", "from wingbeat.tracking.b import c", False),
        ("tracking/a.py", "from . import b", False),
        ("tracking/a.py", "import wingbeat.dataflow.ledger", True),
        ("tracking/a.py", "from wingbeat import dataflow", True),
        ("tracking/a.py", "from ..dataflow import ledger", True),
        ("tracking/a.py", "from wingbeat import __version__", False),
        ("tracking/a.py", "from wingbeat import Swarm", True),
        ("tracking/a.py", "def f():\n    from wingbeat.server import app", True),
        ("tracking/a.py", "if TYPE_CHECKING:\n    import wingbeat.client", True),
        ("core/a.py", "import wingbeat.tracking", True),
        ("core/config/a.py", "from .schema import Config", False),
        ("cli/a.py", "import wingbeat.deploy.local", False),
        ("workers/a.py", "import wingbeat.environments", True),
        ("__init__.py", "from wingbeat.client import Swarm", False),
        ("__init__.py", "from wingbeat.trainer import losses", True),
    ],
)
def test_rank_rule_on_examples(module: str, source: str, faulty: bool) -> None:
    path = PACKAGE / module
    assert any(rank_fault(found, importer_of(path)) for found in imports_of(path, source)) is faulty


def run_python(code: str, *arguments: str) -> str:
    """Standard output of ``python -c code`` in a fresh process that sees this checkout first."""
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_of(package: str) -> list[str]:
    """All importable modules of a package (``__main__`` modules run a program and are left out)."""
    paths = sorted((PACKAGE / package).rglob("*.py"))
    return [module_name(path) for path in paths if path.stem != "__main__"]


def module_exists(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


LOAD_AND_WATCH = """
import importlib, json, sys
blamed = {}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    for name in set(json.loads(sys.argv[2])) & set(sys.modules) - set(blamed):
        blamed[name] = module
print(json.dumps(blamed))
"""


@pytest.mark.parametrize("package", [package for package in LOADS_LIGHT if modules_of(package)])
def test_loading_the_control_side_loads_nothing_heavy(package: str) -> None:
    modules = [module for module in modules_of(package) if not module.startswith(OF_RAY)]
    loaded = json.loads(run_python(LOAD_AND_WATCH, json.dumps(modules), json.dumps(sorted(HEAVY))))
    assert loaded == {}, f"heavy library -> module whose loading brought it in: {loaded}"


LOAD_AND_TIME = """
import importlib, json, sys, time
start = time.process_time()
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
elapsed = time.process_time() - start
print(json.dumps([elapsed, sorted(set(json.loads(sys.argv[2])) & set(sys.modules))]))
"""


def load_and_time(modules: Iterable[str]) -> tuple[float, list[str]]:
    """CPU seconds to load modules in a fresh process (its start not counted), and what of the server extra came along.

    Loading is one thread's work, so on an idle machine this is the wall time; on a busy one it does not measure
    the neighbours.
    """
    elapsed, extra = json.loads(run_python(LOAD_AND_TIME, json.dumps(list(modules)), json.dumps(sorted(SERVER_EXTRA))))
    return elapsed, extra


@pytest.mark.parametrize("module", [m for m in LIGHT_MODULES if module_exists(m)])
def test_light_install_is_enough_for(module: str) -> None:
    assert load_and_time([module])[1] == []


def test_client_loads_fast() -> None:
    modules = [module for module in ("wingbeat", "wingbeat.client") if module_exists(module)]
    assert min(load_and_time(modules)[0] for _ in range(5)) < MAX_LIGHT_IMPORT_S


@pytest.mark.slow
def test_every_module_loads_on_its_own_merits() -> None:
    """No module depends on another having been loaded first, and none fails to load."""
    load = "import importlib, sys; importlib.import_module(sys.argv[1])"
    packages = [package for package in sorted(RANKS) if modules_of(package)]
    for package in packages:
        run_python(load, f"wingbeat.{package}")
    everything = [module for package in packages for module in modules_of(package)]
    run_python(LOAD_AND_WATCH, json.dumps(everything), "[]")
