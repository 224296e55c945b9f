"""What ``wingbeat inspect`` says of conversations that wait for feedback."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from wingbeat.cli.inspect_conversation import open_conversation, show_conversations
from wingbeat.core.types import Split
from wingbeat.server.collect.conversation_files import ConversationFiles, Opened, Taken

TURN = b"a turn"


def test_open_conversations_are_listed_newest_first(tmp_path: Path) -> None:
    console = Console(width=200, record=True, markup=False)
    show_conversations(console, tmp_path)
    assert console.export_text() == "", "a run without any says nothing"
    files = ConversationFiles(tmp_path / "collected")
    files.prepare()
    for number, name in enumerate(["", "ticket 7"]):
        episode_id = f"ep-c-{number:024x}"
        files.append(episode_id, Opened("key-1", "shop", name, bool(number), ("solver",), 1.0))
        for at_s in range(number + 1):
            files.append(episode_id, Taken(TURN, 10.0 * number + at_s, 0))
    show_conversations(console, tmp_path)
    lines = console.export_text().splitlines()
    assert lines[0] == "2 collected conversations wait for feedback (0.0 MiB); the newest:"
    assert lines[1] == f"  ep-c-{1:024x}: 2 turns, key shop, 'ticket 7', may train"
    assert lines[2] == f"  ep-c-{0:024x}: 1 turn, key shop, recorded only"
    found = open_conversation(tmp_path, f"ep-c-{1:024x}")
    assert found is not None and found.captured == (TURN, TURN)
    assert (found.attempt.group.task.id, found.attempt.group.split) == ("ticket 7", Split.TRAIN)
    assert open_conversation(tmp_path, "ep-1-0-0") is None
