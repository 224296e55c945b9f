"""``autogen``: it drops the reasoning; its reflection on what a tool said asks without the tools."""

from __future__ import annotations

import pytest
from kit import Clients

MODES = ("chat", "chat-stream")


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("autogen_agent", mode)


@pytest.mark.parametrize("mode", ["chat-reflect", "chat-reflect-stream"])
def test_a_reflection_without_tools_forks(clients: Clients, mode: str) -> None:
    clients.check_forked("autogen_agent", mode, "tools changed")
