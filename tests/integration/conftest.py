"""Servers as real processes, shared where tests do not disturb each other; everything here is end-to-end."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `harness`: test folders are no packages

from harness import Api, Server, config_text, make_models, serving

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models ``solver``, ``babbler`` and ``checker`` (see make_models.py).

    The processes of one run of the suite share it: whoever comes first makes it.
    """
    script, base = HERE / "make_models.py", tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make_models(script, tmp_path_factory.mktemp("models"))
    made = base.parent / "integration-models"
    with (base.parent / "integration-models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            make_models(script, tmp_path_factory.mktemp("models")).rename(made)
    return made


@pytest.fixture(scope="session")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves ``solver`` (with a trainer that is never fed) and the frozen ``babbler``; admission stays open."""
    folder = tmp_path_factory.mktemp("server")
    config = config_text(
        folder,
        models,
        policies__babbler__model=str(models / "babbler"),
        policies__babbler__context_tokens=4096,
        policies__babbler__trainable=False,
        server__max_body_bytes=1_000_000,
        server__retry_grace_s=0.5,
        dataflow__groups_per_step=256,
        dataflow__max_staleness=4,
        dataflow__group_size=2,
        eval__at_start=False,
    )
    with serving(folder, config) as running:
        yield running


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    """A client of the shared server, once everything is served."""
    async with Api(server) as client:
        await client.ready()
        yield client
