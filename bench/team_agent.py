"""The team of :mod:`bench.team_work` as an agent: plain HTTP to the gateway, tools that sleep.

Loaded by ``wingbeat rollout``; it imports neither the benchmark nor torch.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

import wingbeat

WANTED = {"planner": frozenset("aeiou"), "worker": frozenset("13579")}
"""Whose characters each policy is rewarded for."""
ORDER = ("planner", "worker", "planner")
TIMEOUT = aiohttp.ClientTimeout(total=600)

_sessions: dict[str, aiohttp.ClientSession] = {}
"""One connection pool per server."""


def _session(base_url: str) -> aiohttp.ClientSession:
    if base_url not in _sessions:
        connector = aiohttp.TCPConnector(limit=0)
        _sessions[base_url] = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)
    return _sessions[base_url]


async def _reply(episode: wingbeat.Episode, policy: str, messages: list[dict[str, Any]]) -> str:
    body = {
        "model": episode.model_for(policy),
        "messages": messages,
        "max_tokens": episode.task.payload["reply_tokens"],
        "temperature": 1.0,
    }
    async with _session(episode.base_url).post(
        f"{episode.base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {episode.api_key}"}
    ) as answer:
        answer.raise_for_status()
        content: str = (await answer.json())["choices"][0]["message"]["content"]
        return content


def _score(policy: str, replies: list[str], *, reply_tokens: int) -> float:
    """The share of all the characters that a policy may write which are of its kind."""
    wanted = sum(character in WANTED[policy] for reply in replies for character in reply)
    return wanted / (len(replies) * reply_tokens)


@wingbeat.agent
async def solve(episode: wingbeat.Episode) -> dict[str, float]:
    """Three turns with a tool after each but the last; a reward for each policy."""
    payload = episode.task.payload
    member = int(episode.id.rpartition("-")[2])
    sleep_s = payload.get("sleep_s")
    contexts: dict[str, list[dict[str, Any]]] = {policy: [] for policy in WANTED}
    replies: dict[str, list[str]] = {policy: [] for policy in WANTED}
    heard = payload["question"]
    for turn, policy in enumerate(ORDER):
        context = contexts[policy]
        context.append({"role": "user", "content": heard})
        said = await _reply(episode, policy, context)
        context.append({"role": "assistant", "content": said})
        replies[policy].append(said)
        if turn == len(ORDER) - 1:
            break
        if sleep_s is not None:
            await asyncio.sleep(sleep_s[member][turn])
        heard = f"{said}\n{payload['results'][turn]}"
    return {policy: _score(policy, said, reply_tokens=payload["reply_tokens"]) for policy, said in replies.items()}
