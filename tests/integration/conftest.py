"""Servers as real processes, shared where tests do not disturb each other; everything here is end-to-end."""

from __future__ import annotations

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
    """A folder with the models ``solver``, ``babbler`` and ``checker`` (see make_models.py)."""
    return make_models(HERE / "make_models.py", tmp_path_factory.mktemp("models"))


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
