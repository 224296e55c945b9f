"""``smolagents`` rewrites what the model said: a fork every time, and the reason says where."""

from __future__ import annotations

import pytest
from kit import ANSWER, CALL, Clients

TOOLS = (CALL, f'<tool_call>\n{{"name": "final_answer", "arguments": {{"answer": "{ANSWER}"}}}}\n</tool_call>')
CODE = (
    'Thought: I should add.\n<code>\nprint(add(a=2, b=3, note="é"))\n</code>',
    f'Thought: I know it.\n<code>\nfinal_answer("{ANSWER}")\n</code>',
)


@pytest.mark.parametrize("mode", ["chat-tools", "chat-tools-stream"])
def test_tool_calls_that_become_text_fork(clients: Clients, mode: str) -> None:
    episode = clients.check_forked("smolagents_agent", mode, "message 2 differs: content", replies=TOOLS)
    assert "Calling tools:" in episode.calls[1].prompt


@pytest.mark.parametrize("mode", ["chat-code", "chat-code-stream"])
def test_an_end_that_the_client_writes_itself_forks(clients: Clients, mode: str) -> None:
    """The stop string ends the reply and is no part of it; the agent puts it back into the history."""
    episode = clients.check_forked("smolagents_agent", mode, "message 2 differs: content", replies=CODE)
    assert "</code>" in episode.turns[1].fork_reason
