"""Task sources on disk: they come back whole, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from wingbeat.core.errors import SetupError
from wingbeat.core.types import Split, Task
from wingbeat.server.episodes.sources import SavedSource, load_sources, save_source


@pytest.mark.parametrize(("old", "new"), [("27", "28"), ('"tasks"', '"tasks'), ("t1", "t2")])
def test_a_damaged_source_is_named(tmp_path: Path, old: str, new: str) -> None:
    save_source(tmp_path, SavedSource("sums", Split.TRAIN, (Task("sums", "t1", {"answer": 27}),)))
    (saved,) = load_sources(tmp_path)
    assert saved.tasks[0].payload == {"answer": 27}
    (path,) = (tmp_path / "tasks").iterdir()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SetupError, match=rf"{path.name} is damaged: .*put the source's tasks again"):
        load_sources(tmp_path)
