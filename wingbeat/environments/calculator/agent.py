"""The demo's agent: a multi-turn tool user, written with the official ``openai`` SDK.

It is what an existing agent looks like: point the SDK at ``base_url`` with ``api_key``, loop while the
model calls tools, score the answer, return the reward.
"""

from __future__ import annotations

import json
from typing import Any

from wingbeat.client import Episode, agent
from wingbeat.environments.asking import client_of
from wingbeat.environments.calculator.presets import DEMO_PRESET
from wingbeat.environments.calculator.tasks import CALC_TOOL, calc, score
from wingbeat.environments.calculator_environment import from_task


@agent
async def solve(episode: Episode) -> float:
    """Answer one question, with the calculator at hand; 1.0 for the exact answer."""
    task = from_task(episode.task)
    client = client_of(episode)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    for _ in range(DEMO_PRESET.max_turns):
        completion = await client.chat.completions.create(
            model=episode.model,
            messages=messages,  # type: ignore[arg-type]
            tools=[CALC_TOOL],  # type: ignore[list-item]
            max_tokens=DEMO_PRESET.max_turn_tokens,
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return score(task, reply.content or "")
        messages.append(reply.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": use_tool(call.function.arguments)}  # type: ignore[union-attr]
            for call in reply.tool_calls
        ]
    return 0.0


def use_tool(arguments: str) -> str:
    """The calculator's answer, or an error that the model can read."""
    try:
        return calc(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
