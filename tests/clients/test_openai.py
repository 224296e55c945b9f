"""The ``openai`` SDK: chat and responses with a tool, completions as two text turns."""

from __future__ import annotations

import pytest
from kit import TEXTS, Clients

from wingbeat.tracking.turns import TurnKind

MODES = (
    "chat",
    "chat-helper-stream",
    "chat-chunks-stream",
    "responses",
    "responses-stream",
    "responses-previous",
    "responses-previous-stream",
)


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("openai_sdk", mode)


@pytest.mark.parametrize("mode", ["completions", "completions-stream"])
def test_text_that_begins_with_an_earlier_turn_continues_its_tokens(clients: Clients, mode: str) -> None:
    episode = clients.check_continued("openai_sdk", mode, replies=TEXTS, answer=TEXTS[1])
    assert {turn.kind for turn in episode.turns} == {TurnKind.TEXT}
