"""Clients whose key cannot be set per episode: the base URL alone says which episode they belong to."""

from __future__ import annotations

import pytest
from kit import Clients

RUNS = (("openai_sdk", "chat"), ("openai_sdk", "responses-previous-stream"), ("anthropic_sdk", "messages-threads"))


@pytest.mark.parametrize(("agent", "mode"), RUNS)
def test_the_base_url_names_the_episode(clients: Clients, agent: str, mode: str) -> None:
    clients.check_continued(agent, mode, key_in_url=True)
