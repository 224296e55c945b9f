"""``litellm``: each of its routes, of which Anthropic's face on an OpenAI model is the responses API."""

from __future__ import annotations

import pytest
from kit import TEXTS, Clients

MODES = ("chat", "chat-stream", "responses", "messages", "messages-stream", "responses-as-messages")


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_is_called_and_its_answer_continues_the_tokens(clients: Clients, mode: str) -> None:
    clients.check_continued("litellm_loop", mode)


def test_text_that_begins_with_an_earlier_turn_continues_its_tokens(clients: Clients) -> None:
    clients.check_continued("litellm_loop", "completions", replies=TEXTS, answer=TEXTS[1])
