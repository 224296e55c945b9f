"""A team's journal: what a successor may take, and what not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.client.team_journal import Entry, Journal
from wingbeat.core.errors import SetupError

SERVERS = {"east": "http://e:1", "west": "http://w:1"}
HOLD = """
import sys
from pathlib import Path
from wingbeat.client.team_journal import Entry, Journal
held = Journal(Path(sys.argv[1])).open(Entry("a" * 22, {"east": "http://e:1", "west": "http://w:1"}))
held.commit()
sys.stdout.write("held\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_only_what_a_dead_process_left_is_taken_and_only_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        journal = Journal(tmp_path)
        assert list(journal.left()) == []
        process.kill()
    (left,) = journal.left()
    assert left.entry == Entry("a" * 22, SERVERS, is_committing=True)
    assert list(left.entry.servers) == ["east", "west"]
    assert list(Journal(tmp_path).left()) == []  # another successor
    left.release()
    (again,) = Journal(tmp_path).left()
    again.remove()
    assert os.listdir(tmp_path) == []


def test_what_was_killed_before_it_was_whole_is_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (tmp_path / f"{'e' * 22}.transaction.new").write_text("")
    assert list(journal.left()) == [] and os.listdir(tmp_path) == []


def test_entries_are_private_and_a_half_written_line_leaves_the_state_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "made" / "here")
    journal.open(Entry("b" * 22, SERVERS)).release()
    (path,) = (tmp_path / "made" / "here").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    with path.open("ab") as file:
        file.write(b'{"version": 1, "transaction": "b')
    (left,) = journal.left()
    assert not left.entry.is_committing


def test_a_full_disk_leaves_the_state_before_it_and_the_next_try_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line that another one followed would hide that "commit" may have been said."""
    entry = Journal(tmp_path).open(Entry("f" * 22, SERVERS))
    with monkeypatch.context() as full:
        write = os.write
        full.setattr(os, "write", lambda file, data: write(file, data[:20]))
        with pytest.raises(SetupError, match="No space left"):
            entry.commit()
    assert not entry.entry.is_committing
    entry.commit()
    entry.release()
    (left,) = Journal(tmp_path).left()
    assert left.entry.is_committing
    left.commit()  # a successor says it again
    left.release()
    (left,) = Journal(tmp_path).left()
    assert left.entry.is_committing


def test_what_cannot_be_read_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"{'c' * 22}.transaction.json"
    for text in ("no json\n", '["a"]\n', '{"version": 1}\n', ""):
        path.write_text(text)
        assert list(Journal(tmp_path).left()) == []
        assert "cannot be read" in caplog.text and path.exists()
        caplog.clear()
    path.write_text(json.dumps({"version": 2}) + "\n")
    with pytest.raises(SetupError, match="expected version 1, got 2"):
        list(Journal(tmp_path).left())


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"journal .* cannot be made"):
        Journal(tmp_path / "file" / "journal")
    journal = Journal(tmp_path / "journal")
    journal.open(Entry("d" * 22, SERVERS)).remove()
    (tmp_path / "journal").rmdir()
    with pytest.raises(SetupError, match="journal cannot be written"):
        journal.open(Entry("d" * 22, SERVERS))
