"""Against real vLLM, on a CPU: `make test-vllm` makes its environment and names its interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]  # `rig`, `harness`: test folders are no packages

from harness import make_models  # noqa: E402
from rig import Rig  # noqa: E402

PYTHON = "WINGBEAT_VLLM_PYTHON"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM."""
    found = os.environ.get(PYTHON, "")
    assert found, f"set {PYTHON} to the Python of an environment with vLLM, or run `make test-vllm`"
    return found


@pytest.fixture(scope="session")
def vllm_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models ``tied``, ``untied`` and ``solver`` (see make_models.py)."""
    return make_models(HERE / "make_models.py", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def make_rig(
    vllm_python: str, vllm_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, which end with the module."""
    made: list[Rig] = []

    def make(**options: object) -> Rig:
        given: dict[str, Any] = {"python": vllm_python, **options}
        rig = Rig(vllm_models, folder=tmp_path_factory.mktemp("rig"), **given)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()
