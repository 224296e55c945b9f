"""``agentscope``: it drops the reasoning, names every message, and appends the time to the conversation."""

from __future__ import annotations

import pytest
from kit import Clients

MODES = ("chat", "chat-stream", "responses", "responses-stream")


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("agentscope_agent", mode)


@pytest.mark.parametrize("mode", ["chat-clock", "responses-clock-stream"])
def test_the_clock_is_new_text_and_breaks_no_timeline(clients: Clients, mode: str) -> None:
    """Each turn ends with a message that tells the time; those of earlier turns stay as they were."""
    episode = clients.check_continued("agentscope_agent", mode)
    assert [call.prompt.count("<current-time>") for call in episode.calls] == [1, 2]
