"""``langgraph``: over chat it drops the reasoning and writes the arguments anew; neither breaks the timeline."""

from __future__ import annotations

import pytest
from kit import Clients

MODES = ("chat", "chat-stream", "responses", "responses-stream", "messages", "messages-stream")


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("langgraph_react", mode)
