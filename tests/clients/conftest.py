"""One server with a scripted model for all clients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `kit`: test folders are no packages
pytest.register_assert_rewrite("kit")

from kit import HERE, Clients, Script, find_python  # noqa: E402

from bench.scripted_server import scripted_server, write_model_folder  # noqa: E402
from wingbeat.tracking import ChatTemplate  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    python = find_python()
    folder = tmp_path_factory.mktemp("clients")
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    model = write_model_folder(folder / "model", template=template)
    script = Script()
    with scripted_server(folder, script, model=model) as server:
        yield Clients(server, script, python, folder, ChatTemplate.load(model))
