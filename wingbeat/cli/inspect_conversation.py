"""What ``wingbeat inspect`` shows of collected conversations that still wait for feedback."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from wingbeat.dataflow.ledger_schema import AttemptState
from wingbeat.dataflow.ledger_views import AttemptView
from wingbeat.server.collect.conversation_files import ATTEMPT, FOLDER, ConversationFiles, StoredConversation
from wingbeat.server.collect.conversations import group_of

SHOWN = 10


@dataclass(frozen=True, slots=True)
class OpenConversation:
    """One as it is on disk."""

    attempt: AttemptView
    captured: tuple[bytes, ...]
    """Its turns."""


def open_conversation(run_dir: Path, episode_id: str) -> OpenConversation | None:
    """None where no open conversation has this id."""
    stored = _files(run_dir).read(episode_id)
    return None if stored is None else _view(episode_id, stored)


def show_conversations(console: Console, run_dir: Path) -> None:
    """How many there are, and the newest."""
    files = _files(run_dir)
    stored_by_id = ((episode_id, files.read(episode_id)) for episode_id in files.names())
    found = [(episode_id, stored) for episode_id, stored in stored_by_id if stored and stored.turns]
    if not found:
        return
    found.sort(key=lambda pair: pair[1].turns[-1].at_s, reverse=True)
    size = sum(stored.num_bytes for _, stored in found)
    console.print(f"{len(found)} collected conversations wait for feedback ({size / 2**20:.1f} MiB); the newest:")
    for episode_id, stored in found[:SHOWN]:
        opened = stored.opened
        name = f", {opened.conversation_id!r}" if opened.conversation_id else ""
        turns = f"{len(stored.turns)} turn{'s' if len(stored.turns) > 1 else ''}"
        trains = "may train" if opened.train else "recorded only"
        console.print(
            f"  {episode_id}: {turns}, key {opened.key_name}{name}, {trains}", highlight=False, soft_wrap=True
        )


def _files(run_dir: Path) -> ConversationFiles:
    return ConversationFiles(run_dir / FOLDER)


def _view(episode_id: str, stored: StoredConversation) -> OpenConversation:
    opened = stored.opened
    group = group_of(
        episode_id,
        key_name=opened.key_name,
        name=opened.conversation_id,
        train=opened.train,
        policies=opened.policies,
    )
    attempt = AttemptView(
        group=group,
        state=AttemptState.RUNNING,
        episode_id=episode_id,
        attempt=ATTEMPT,
        label="",
        created_s=opened.opened_s,
        record=None,
        samples=(),
        client=opened.key_id,
    )
    return OpenConversation(attempt, tuple(taken.turn for taken in stored.turns))
