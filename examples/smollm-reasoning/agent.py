"""An ordinary agent: the official openai SDK, one example in the prompt, the reply's last integer as the answer."""

from __future__ import annotations

import re

from openai import AsyncOpenAI, DefaultAioHttpClient

import wingbeat
from wingbeat.environments.registry import make_environment

EXAMPLE = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "Calculate 42 + 7."},
    {"role": "assistant", "content": "The answer is 49."},
]
ENVIRONMENT = make_environment("reasoning-gym:basic_arithmetic", {"size": 1, "eval_size": 1})
"""Only its scorer is used here; the tasks come from the server."""

_shared: dict[str, AsyncOpenAI] = {}
"""One connection pool per server, for all episodes of this process."""


def _client(episode: wingbeat.Episode) -> AsyncOpenAI:
    if episode.base_url not in _shared:
        _shared[episode.base_url] = AsyncOpenAI(
            base_url=episode.base_url,
            api_key=episode.api_key,
            http_client=DefaultAioHttpClient(),
            timeout=600,
            max_retries=14,  # bridges a restart of the server of a minute
        )
    return _shared[episode.base_url].with_options(api_key=episode.api_key)


@wingbeat.agent
async def solve(episode: wingbeat.Episode) -> float:
    """One sum, for example ``Calculate 48 + 16.``"""
    completion = await _client(episode).chat.completions.create(
        model=episode.model,
        messages=[*EXAMPLE, {"role": "user", "content": episode.task.payload["question"]}],
        max_tokens=10,
    )
    numbers = re.findall(r"-?\d+", completion.choices[0].message.content or "")
    return ENVIRONMENT.score(episode.task, numbers[-1] if numbers else "")
