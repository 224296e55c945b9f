"""Words spelt backward: tasks and scorer of the reasoning-gym library, which only this client has.

python examples/cocktail/backward.py [URL]

The question is asked letter by letter, as the small model reads letters and not words.
"""

from __future__ import annotations

import asyncio
import sys

import reasoning_gym
from openai import AsyncOpenAI, DefaultAioHttpClient

from wingbeat import AsyncSwarm, Episode, Runner, Split, Task, agent

HELD_OUT, TRAINING = 100, 1000
dataset = reasoning_gym.create_dataset("spell_backward", size=5000, seed=1, min_word_len=3, max_word_len=4)
http = DefaultAioHttpClient()  # one pool of connections for all episodes


def tasks() -> list[Task]:
    """Distinct words in small letters; a payload is an entry of the library."""
    words = {entry["metadata"]["word"]: entry for entry in dataset if entry["metadata"]["word"].islower()}
    found = list(words.items())[: HELD_OUT + TRAINING]
    return [Task("backward", word, {"entry": entry}) for word, entry in found]


@agent(sources=["backward"])
async def solve(episode: Episode) -> float:
    entry = episode.task.payload["entry"]
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=http, max_retries=14)
    question = "backward " + "-".join(entry["metadata"]["word"])
    completion = await client.chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": question}], max_tokens=12
    )
    answer = (completion.choices[0].message.content or "").replace("-", "")
    # the library gives part of the reward for each right letter, on which so small a model would settle
    return float(dataset.score_answer(answer, entry) == 1.0)


async def main(url: str) -> None:
    made = tasks()
    async with http, AsyncSwarm(url) as swarm:
        await swarm.put_tasks("backward", made[:HELD_OUT], split=Split.EVAL)
        await swarm.put_tasks("backward", made[HELD_OUT:])
        await Runner(swarm, solve, concurrency=48).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["http://127.0.0.1:8321"]))
