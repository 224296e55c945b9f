"""Nothing of ours reads or writes a format that can hold a program: JSON, msgpack, safetensors and SQLite only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "wingbeat").rglob("*.py"))

IMPORTS = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "pickletools", "dill", "marshal", "shelve", "joblib", "copyreg"}
    | {"multiprocessing", "concurrent.futures.process", "xmlrpc", "yaml", "ray"}
)
"""``multiprocessing``: its pipes and queues pickle whatever they carry, and so do process pools."""
ON_RAY = (ROOT / "wingbeat" / "deploy" / "ray", ROOT / "wingbeat" / "resources" / "backends" / "ray.py")
"""Ray pickles on its own transport, which docs/security.md names; only `wingbeat deploy ray` and leases of kind `ray`
load it."""
CALLS = frozenset(
    {"torch.load", "torch.save", "torch.hub.load", "torch.package.PackageImporter", "torch.jit.load"}
    | {"np.load", "numpy.load", "pd.read_pickle", "pandas.read_pickle", "ProcessPoolExecutor"}
    | {"pool.ProcessPoolExecutor", "futures.ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"}
    | {"torch.serialization.load", "eval", "exec", "runpy.run_path", "runpy.run_module", "logging.config.dictConfig"}
)
FLAGS = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False, "use_safetensors": False}
"""Keyword arguments with the value that lets a file run code."""
NAMES = frozenset(name.rpartition(".")[2] for name in CALLS)
WORDS = re.compile(rf"\b(?:{'|'.join(map(re.escape, IMPORTS | NAMES | FLAGS.keys() | {'from_pretrained'}))})\b")


def dotted(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """The name of a function, with the modules that other names stand for."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def aliases_in(tree: ast.AST) -> dict[str, str]:
    """What the names mean that imports make."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and dotted(node.func, {}).split(".")[-1] in ("import_module", "__import__"):
        yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def faults(tree: ast.AST) -> Iterator[str]:
    aliases = aliases_in(tree)
    for node in ast.walk(tree):
        for name in imported(node):
            if any(name == banned or name.startswith(f"{banned}.") for banned in IMPORTS):
                yield f"line {getattr(node, 'lineno', 0)} imports {name}"
        if isinstance(node, ast.Call):
            function = dotted(node.func, aliases)
            if function in CALLS:
                yield f"line {node.lineno} calls {function}"
            is_model = function.endswith(".from_pretrained") and "Model" in function
            if is_model and not any(k.arg == "use_safetensors" for k in node.keywords):
                yield f"line {node.lineno} loads a model and does not ask for safetensors"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in FLAGS and value is FLAGS[keyword.arg]:
                    yield f"line {node.lineno} passes {keyword.arg}={value}"


def test_no_module_can_load_a_program_from_data() -> None:
    found = [
        f"{path.relative_to(ROOT)} {fault}"
        for path in MODULES
        for text in [path.read_text(encoding="utf-8")]
        if WORDS.search(text)  # parsing all of them takes seconds
        for fault in faults(ast.parse(text))
        if not (any(path.is_relative_to(place) for place in ON_RAY) and re.search(r"imports ray\b", fault))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import connection",
        "import multiprocessing.pool as p",
        "import_module('dill')",
        "torch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load as read\nread(path)",
        "from numpy import load\nload(path)",
        "exec(text)",
        "AutoModelForCausalLM.from_pretrained(folder)",
        "from concurrent import futures\nfutures.ProcessPoolExecutor()",
        "np.load(path, allow_pickle=True)",
        "Model.from_pretrained(folder, trust_remote_code=True)",
        "from concurrent.futures import process\nfutures.ProcessPoolExecutor()",
    ],
)
def test_what_is_looked_for_is_found(code: str) -> None:
    assert list(faults(ast.parse(code)))
