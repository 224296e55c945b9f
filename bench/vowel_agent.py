"""The vowel task of :mod:`bench.trainer_work` as an agent: one call to the gateway, one reward.

Loaded by ``wingbeat rollout``; it imports neither the benchmark nor torch.
"""

from __future__ import annotations

import aiohttp

import wingbeat

VOWELS = frozenset("aeiou")
TIMEOUT = aiohttp.ClientTimeout(total=600)
_sessions: dict[str, aiohttp.ClientSession] = {}
"""One connection pool per server."""


def _session(base_url: str) -> aiohttp.ClientSession:
    if base_url not in _sessions:
        connector = aiohttp.TCPConnector(limit=0)
        _sessions[base_url] = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)
    return _sessions[base_url]


@wingbeat.agent
async def solve(episode: wingbeat.Episode) -> float:
    """The share of vowels among the tokens that a reply may have."""
    payload = episode.task.payload
    body = {
        "model": episode.model,
        "messages": [{"role": "user", "content": payload["question"]}],
        "max_tokens": payload["max_tokens"],
        "temperature": 1.0,
    }
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    async with _session(episode.base_url).post(
        f"{episode.base_url}/chat/completions", json=body, headers=headers
    ) as answer:
        answer.raise_for_status()
        content: str = (await answer.json())["choices"][0]["message"]["content"] or ""
    return sum(letter in VOWELS for letter in content) / payload["max_tokens"]
