"""The ``anthropic`` SDK: its tool runner with server-side threads (its default) and with the whole history."""

from __future__ import annotations

import pytest
from kit import Clients

MODES = (
    "messages-threads",
    "messages-threads-stream",
    "messages-history",
    "messages-history-stream",
    "messages-stream",
)


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("anthropic_sdk", mode)
