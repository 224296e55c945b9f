"""Captured turns: there until the attempt's end is on record, whatever happens to the process in between."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wingbeat.core.errors import UnavailableError
from wingbeat.core.types import Outcome
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_captures import Captures
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.records import BeginRecord

WRITER = """
import os, sys
from pathlib import Path
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta

ledger = Ledger.open(Path(sys.argv[1]), run=RunMeta("crash", seed=0))
for number in range(1_000_000):
    ledger.capture_turn(f"ep-{number % 3}", 1, b"%d:" % number + os.urandom(1 + number % 5000))
    sys.stdout.write(f"{number}\\n")  # what the client would be told
    sys.stdout.flush()
"""


@pytest.fixture
def captures(tmp_path) -> Captures:
    captures = Captures(tmp_path / "turns")
    captures.prepare()
    return captures


@pytest.fixture
def ledger(open_ledger, make) -> Ledger:
    """A ledger whose episode ``g-0`` runs."""
    ledger = open_ledger()
    ledger.record_group(make.spec(), episode_ids=("g-0", "g-1"))
    ledger.record_begin(BeginRecord("g-0", 1, group_id="g")).result()
    return ledger


def test_turns_read_back_in_order_and_apart_by_attempt(captures):
    turns = [b"one", b"", b"\x00" * 100_000]
    for turn in turns:
        captures.append("client:../a/b:\n", 1, turn)
    captures.append("client:../a/b:\n", 2, b"other")
    assert captures.read("client:../a/b:\n", 1) == tuple(turns)
    assert captures.read("client:../a/b:\n", 2) == (b"other",)
    assert captures.read("nobody", 1) == ()
    assert sorted(captures.attempts()) == [("client:../a/b:\n", 1), ("client:../a/b:\n", 2)]
    captures.remove("client:../a/b:\n", 1)
    captures.remove("client:../a/b:\n", 1)
    assert captures.attempts() == (("client:../a/b:\n", 2),)


@pytest.mark.parametrize("cut", range(1, 13))
def test_reading_ends_before_a_torn_frame(captures, tmp_path, cut):
    captures.append("e", 1, b"first")
    captures.append("e", 1, b"last")
    (path,) = (tmp_path / "turns").iterdir()
    os.truncate(path, path.stat().st_size - cut)  # the last frame is 8 + 4 bytes
    assert captures.read("e", 1) == (b"first",)


def test_reading_ends_before_a_damaged_frame_and_ignores_other_files(captures, tmp_path):
    captures.append("e", 1, b"first")
    captures.append("e", 1, b"last")
    (path,) = (tmp_path / "turns").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    assert captures.read("e", 1) == (b"first",)
    path.write_bytes(b"\x00" * 4096)  # what a power cut may leave
    assert captures.read("e", 1) == () and captures.attempts() == ()


def test_full_disk_is_an_error_and_leaves_the_file_as_it_was(captures, monkeypatch, tmp_path):
    captures.append("e", 1, b"first")
    whole = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: whole(file, [parts[0]]))
    with pytest.raises(UnavailableError, match="only a part"):
        captures.append("e", 1, b"second")
    monkeypatch.undo()
    captures.append("e", 1, b"third")
    assert captures.read("e", 1) == (b"first", b"third")
    (tmp_path / "turns").rename(tmp_path / "gone")
    with pytest.raises(UnavailableError, match="cannot record"):
        captures.append("e", 1, b"fourth")


def test_running_attempts_show_their_turns_to_readers(ledger, tmp_path):
    ledger.capture_turn("g-0", 1, b"turn")
    with open_read_only(tmp_path / "ledger.sqlite") as reader:
        assert reader.captured_turns("g-0", 1) == ledger.captured_turns("g-0", 1) == (b"turn",)
        assert reader.captured_turns("g-1", 1) == ()


def test_finish_and_abort_let_turns_go_and_loss_keeps_them(ledger, make):
    ledger.record_begin(BeginRecord("g-1", 1, group_id="g"))
    for episode_id in ("g-0", "g-1"):
        ledger.capture_turn(episode_id, 1, b"turn")
    ledger.record_end("g-0", 1, state=AttemptState.LOST, outcome=Outcome.CLIENT).result()
    assert ledger.captured_turns("g-0", 1) == (b"turn",)
    assert ledger.record_finish(make.record("g-0")).result()
    ledger.record_end("g-1", 1, state=AttemptState.ABORTED, outcome=Outcome.CLIENT).result()
    assert ledger.captured_turns("g-0", 1) == ledger.captured_turns("g-1", 1) == ()


def test_refused_finish_keeps_turns(ledger, make):
    ledger.capture_turn("g-0", 1, b"turn")
    ledger.close_group("g").result()
    assert ledger.record_finish(make.record("g-0")).exception() is not None
    assert ledger.captured_turns("g-0", 1) == (b"turn",)


def test_interrupted_attempts_keep_their_turns(ledger, open_ledger):
    ledger.capture_turn("g-0", 1, b"turn")
    ledger.close()
    again = open_ledger()
    again.interrupt_running().result()
    assert [view.state for view in again.episode("g-0")] == [AttemptState.INTERRUPTED]
    assert again.captured_turns("g-0", 1) == (b"turn",)


def test_an_attempt_that_goes_on_has_all_its_whole_turns(ledger, tmp_path):
    for turn in (b"one", b"two"):
        ledger.capture_turn("g-0", 1, turn)
    assert ledger.recover_turns("g-0", 1) == (b"one", b"two")
    (path,) = (tmp_path / "turns").iterdir()
    os.truncate(path, path.stat().st_size - 1)
    assert ledger.recover_turns("g-0", 1) == (b"one",)


def test_what_a_kill_left_of_an_ended_attempt_is_swept(ledger, open_ledger, make, tmp_path):
    ledger.record_finish(make.record("g-0")).result()
    Captures(tmp_path / "turns").append("g-0", 1, b"turn")  # the kill came between record and removal
    assert ledger.captured_turns("g-0", 1) == ()
    ledger.close()
    open_ledger()
    assert list((tmp_path / "turns").iterdir()) == []


def test_only_the_newest_turns_of_attempts_that_can_never_finish_are_kept(ledger, make, tmp_path):
    ledger.record_group(make.spec("h"), episode_ids=["h-0", "h-1"])
    for n, episode_id in enumerate(("h-0", "h-1", "g-0")):  # (g-0 runs)
        if episode_id != "g-0":
            ledger.record_begin(BeginRecord(episode_id, 1, group_id="h")).result()
        ledger.capture_turn(episode_id, 1, b"turn" * 50)
        path = max((tmp_path / "turns").iterdir(), key=lambda path: path.stat().st_ctime_ns)
        os.utime(path, (n, n))
    ledger.close_group("h").result()
    ledger.sweep_captures(keep_bytes=300)
    assert [bool(ledger.captured_turns(name, 1)) for name in ("h-0", "h-1", "g-0")] == [False, True, True]


def test_attempt_begins_with_nothing_captured(ledger):
    ledger.capture_turn("g-1", 1, b"of a begin that a kill kept from the ledger")
    ledger.record_begin(BeginRecord("g-1", 1, group_id="g")).result()
    assert ledger.captured_turns("g-1", 1) == ()


@pytest.mark.slow
@pytest.mark.parametrize("num_lines", [1, 700, 2000])
def test_kill_loses_no_acknowledged_turn(tmp_path, num_lines):
    path = tmp_path / "ledger.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(num_lines)]
    writer.kill()
    lines += [line for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()
    with open_read_only(path) as reader:
        found = [turn for i in range(3) for turn in reader.captured_turns(f"ep-{i}", 1)]
    numbers = sorted(int(turn.partition(b":")[0]) for turn in found)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) - len(lines) in (0, 1), "all that was acknowledged, and at most the one being answered"
