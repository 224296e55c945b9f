"""The agent: solves one episode and returns its reward.

Any framework will do, as long as it calls an OpenAI-compatible URL: use `episode.base_url`,
`episode.api_key` and `episode.model`.  Raising an exception ends this episode only; it is never a reward.
"""

import json
from typing import Any, cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

import wingbeat
from wingbeat.environments.calculator import CALC_TOOL, calc

MAX_TURNS = 2  # one tool call and one answer
MAX_TURN_TOKENS = 16

TOOLS = [cast(ChatCompletionToolParam, CALC_TOOL)]

# One pool of connections for all episodes; each episode brings its own address and key.
# The retries bridge a restart of the server of a minute.
CONNECTIONS = AsyncOpenAI(base_url="http://set.by.each.episode", api_key="set by each episode", max_retries=14)


@wingbeat.agent
async def solve(episode: wingbeat.Episode) -> float:
    """Ask, let the model call the tool, and score its final answer: 1 if exactly right, else 0."""
    client = CONNECTIONS.with_options(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": episode.task.payload["question"]}]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model=episode.model, messages=messages, tools=TOOLS, max_tokens=MAX_TURN_TOKENS
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return score(message.content, episode.task.payload["answer"])
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.arguments)}
            for call in message.tool_calls
            if call.type == "function"
        ]
    return 0.0


def run_tool(arguments: str) -> str:
    """What the tool returns; a model's mistakes are told to it as text, so that it can learn from them."""
    try:
        return calc(str(json.loads(arguments)["expression"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"


def score(answer: str | None, expected: str) -> float:
    """The reward.  There is no partial credit on purpose: policies settle for it."""
    return 1.0 if (answer or "").strip() == expected else 0.0
