"""Sums with a calculator: two turns and a tool, written with the official ``openai`` SDK.

python examples/cocktail/sums.py [URL]

The server deals the tasks: its configuration has them.  This client only says that it can solve them.
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
import sys

from openai import AsyncOpenAI, DefaultAioHttpClient

from wingbeat import AsyncSwarm, Episode, Runner, agent

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate a sum, difference or product of two integers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": 64}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
http = DefaultAioHttpClient()  # one pool of connections for all episodes


@agent(sources=["sums"])
async def solve(episode: Episode) -> float:
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=http, max_retries=14)
    messages: list = [{"role": "user", "content": episode.task.payload["question"]}]
    for _ in range(2):
        completion = await client.chat.completions.create(
            model=episode.model, messages=messages, tools=[CALC], max_tokens=16
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return float((reply.content or "").strip() == episode.task.payload["answer"])
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def calculate(arguments: str) -> str:
    try:
        found = re.fullmatch(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        found = None
    if found is None:
        return "error: expected an expression like 3+8"
    return str(OPERATORS[found[2]](int(found[1]), int(found[3])))


async def main(url: str) -> None:
    async with http, AsyncSwarm(url) as swarm:
        await Runner(swarm, solve, concurrency=96).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["http://127.0.0.1:8321"]))
