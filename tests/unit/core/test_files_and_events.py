"""Files on a full disk: whole lines or none, the old file or the new one, and events say how many were lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wingbeat.core.errors import UnavailableError
from wingbeat.core.events import EventLog, read_events
from wingbeat.core.files import LineFile, write_atomically


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A disk with so many bytes of room, for ``os.write``."""
    room = {"bytes": 10_000}
    write = os.write

    def limited(file: int, data: bytes) -> int:
        taken = min(len(data), room["bytes"])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        room["bytes"] -= taken
        return write(file, data[:taken])

    monkeypatch.setattr("wingbeat.core.files.os.write", limited)
    return room


def test_events_are_lost_whole_and_counted(tmp_path: Path, disk: dict[str, int]) -> None:
    path = tmp_path / "events.jsonl"
    seen: list[str] = []
    with EventLog(path, clock=lambda: 1.0) as log:
        log.subscribe(lambda record: seen.append(record["event"]))
        log.emit("first")
        disk["bytes"] = 7  # a part of the next line
        log.emit("second")
        log.emit("third")
        assert [record["event"] for record in read_events(path)] == ["first"]
        disk["bytes"] = 10_000
        log.emit("fourth")
        log.emit("fifth")
    assert [record["event"] for record in read_events(path)] == ["first", "events_lost", "fourth", "fifth"]
    assert read_events(path)[1]["count"] == 2
    assert seen == ["first", "second", "third", "fourth", "fifth"]
    log.emit("after the end")


def test_lines_raise_for_anything_but_a_full_disk(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.append("x")


def fail_with(number: int) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, b"old")
    monkeypatch.setattr("wingbeat.core.files.os.fsync", fail_with(errno.ENOSPC))
    with pytest.raises(UnavailableError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
