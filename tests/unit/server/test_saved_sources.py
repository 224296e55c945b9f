"""Task sources on disk: they come back whole, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from wingbeat.core.config.limits import LimitsConfig
from wingbeat.core.errors import PayloadTooLarge, SetupError
from wingbeat.core.types import Split, Task
from wingbeat.server.episodes.sources import SavedSource, check_room, load_sources, save_source


def test_sources_fill_no_more_than_they_may(tmp_path: Path) -> None:
    def save(source: str) -> None:
        save_source(tmp_path, SavedSource(source, Split.TRAIN, (Task(source, "t1", {}),)))

    limits = LimitsConfig(task_sources=2, task_bytes=1000)
    for source in ("a", "b"):
        check_room(tmp_path, (source, Split.TRAIN), 100, limits=limits)
        save(source)
    check_room(tmp_path, ("a", Split.TRAIN), 800, limits=limits)
    for place in (("c", Split.TRAIN), ("a", Split.EVAL)):
        with pytest.raises(PayloadTooLarge, match=r"2 task sources \(limits\.task_sources = 2\)"):
            check_room(tmp_path, place, 1, limits=limits)
    with pytest.raises(PayloadTooLarge, match=r"would have \d+ bytes \(limits\.task_bytes = 1000\)"):
        check_room(tmp_path, ("a", Split.TRAIN), 1000, limits=limits)


@pytest.mark.parametrize(("old", "new"), [("27", "28"), ('"tasks"', '"tasks'), ("t1", "t2")])
def test_a_damaged_source_is_named(tmp_path: Path, old: str, new: str) -> None:
    save_source(tmp_path, SavedSource("sums", Split.TRAIN, (Task("sums", "t1", {"answer": 27}),)))
    (saved,) = load_sources(tmp_path)
    assert saved.tasks[0].payload == {"answer": 27}
    (path,) = (tmp_path / "tasks").iterdir()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SetupError, match=rf"{path.name} is damaged: .*put the source's tasks again"):
        load_sources(tmp_path)
