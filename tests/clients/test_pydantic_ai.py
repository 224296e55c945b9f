"""``pydantic-ai``: over chat it writes the arguments without spaces, over responses it drops the ids of items."""

from __future__ import annotations

import pytest
from kit import Clients

MODES = ("chat", "chat-stream", "responses", "responses-stream", "messages", "messages-stream")


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("pydantic_ai_agent", mode)
