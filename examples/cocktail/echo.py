"""Repeating four digits: one turn, and no dependency but Wingbeat's own.

python examples/cocktail/echo.py [URL]

This client brings its tasks, held-out ones first.
"""

from __future__ import annotations

import asyncio
import random
import sys

import aiohttp

from wingbeat import AsyncSwarm, Episode, Runner, Split, Task, agent

HELD_OUT, TRAINING = 100, 1500


def tasks() -> list[Task]:
    """Distinct strings of four digits."""
    drawn = random.Random(1).sample(range(10_000), HELD_OUT + TRAINING)
    return [Task("echo", f"{number:04}", {"digits": f"{number:04}"}) for number in drawn]


@agent(sources=["echo"])
async def solve(episode: Episode) -> float:
    digits = episode.task.payload["digits"]
    body = {
        "model": episode.model,
        "messages": [{"role": "user", "content": f"say {digits}"}],
        "max_tokens": 8,
    }
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    async with aiohttp.request("POST", f"{episode.base_url}/chat/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        reply = await response.json()
    return float(reply["choices"][0]["message"]["content"] == digits)


async def main(url: str) -> None:
    made = tasks()
    async with AsyncSwarm(url) as swarm:
        await swarm.put_tasks("echo", made[:HELD_OUT], split=Split.EVAL)
        await swarm.put_tasks("echo", made[HELD_OUT:])
        await Runner(swarm, solve, concurrency=32).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["http://127.0.0.1:8321"]))
