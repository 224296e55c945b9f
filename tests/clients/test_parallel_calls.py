"""Two tool calls in one reply, after odd spaces: every client runs both, its next request continues the same tokens."""

from __future__ import annotations

import pytest
from kit import CALL, Clients

SECOND = '{"a": 4,"b":   5, "note": "other"}'
REPLIES = (
    f'{CALL.replace("Let me", "  Let me")}\n<tool_call>\n{{"name": "add", "arguments": {SECOND}}}\n</tool_call>',
    "The sums are 5 and 9.",
)
RUNS = (
    ("openai_sdk", "chat-chunks-stream"),
    ("openai_sdk", "responses-previous-stream"),
    ("anthropic_sdk", "messages-threads-stream"),
    ("openai_agents_sdk", "chat-stream"),
    ("openai_agents_sdk", "responses"),
    ("langgraph_react", "chat"),
    ("langgraph_react", "messages-stream"),
    ("pydantic_ai_agent", "chat-stream"),
    ("pydantic_ai_agent", "responses"),
    ("litellm_loop", "chat-stream"),
    ("agentscope_agent", "chat-stream"),
    ("autogen_agent", "chat-stream"),
)


@pytest.mark.parametrize(("agent", "mode"), RUNS)
def test_both_calls_are_answered_in_one_timeline(clients: Clients, agent: str, mode: str) -> None:
    episode = clients.check_continued(agent, mode, replies=REPLIES, answer=REPLIES[1])
    assert episode.calls[1].prompt.count("<|im_start|>tool\n") == 2
