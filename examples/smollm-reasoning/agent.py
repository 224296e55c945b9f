"""An ordinary agent: the official openai SDK, few-shot sums, the first integer of the reply as the answer."""

from __future__ import annotations

import re

from openai import AsyncOpenAI, DefaultAioHttpClient

import wingbeat
from wingbeat.environments.registry import make_environment

EXAMPLES = "3 + 2 = 5\n9 - 5 = 4\n8 + 7 = 15\n"
ENVIRONMENT = make_environment("reasoning-gym:chain_sum", {"size": 1, "eval_size": 1})
"""Only its scorer is used here; the tasks come from the server."""

_shared: dict[str, AsyncOpenAI] = {}


def _client(episode: wingbeat.Episode) -> AsyncOpenAI:
    if episode.base_url not in _shared:
        _shared[episode.base_url] = AsyncOpenAI(
            base_url=episode.base_url, api_key=episode.api_key, http_client=DefaultAioHttpClient(), timeout=600
        )
    return _shared[episode.base_url].with_options(api_key=episode.api_key)


@wingbeat.agent
async def solve(episode: wingbeat.Episode) -> float:
    """One sum, for example ``57 - 8``."""
    expression = episode.task.payload["entry"]["metadata"]["expression"]
    completion = await _client(episode).chat.completions.create(
        model=episode.model,
        messages=[{"role": "user", "content": f"{EXAMPLES}{expression} ="}],
        max_tokens=4,
        stop=["\n"],
    )
    number = re.search(r"-?\d+", completion.choices[0].message.content or "")
    return ENVIRONMENT.score(episode.task, number.group() if number else "")
