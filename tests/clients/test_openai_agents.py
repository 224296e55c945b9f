"""``openai-agents``: over chat it drops the reasoning; over responses it sends all back, or only what is new."""

from __future__ import annotations

import pytest
from kit import Clients

MODES = ("chat", "chat-stream", "responses", "responses-stream", "responses-previous", "responses-previous-stream")


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("openai_agents_sdk", mode)
