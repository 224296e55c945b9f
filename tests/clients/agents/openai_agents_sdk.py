"""``openai-agents``: its runner over the chat and the responses API."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from example import MAX_TOKENS, QUESTION, Setting, add, tell
from openai import AsyncOpenAI

set_tracing_disabled(True)
setting = Setting()


async def main() -> None:
    client = AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key)
    wire = OpenAIChatCompletionsModel if setting.mode.startswith("chat") else OpenAIResponsesModel
    agent = Agent(
        name="adder",
        instructions="You can add.",
        model=wire(model=setting.model, openai_client=client),
        model_settings=ModelSettings(max_tokens=MAX_TOKENS),
        tools=[function_tool(add)],
    )
    options: dict[str, Any] = {"auto_previous_response_id": True} if "previous" in setting.mode else {}
    num_texts = 0
    if setting.mode.endswith("stream"):
        streamed = Runner.run_streamed(agent, QUESTION, **options)
        async for event in streamed.stream_events():
            num_texts += event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        answer = streamed.final_output
    else:
        answer = (await Runner.run(agent, QUESTION, **options)).final_output
    tell(answer, num_texts=num_texts)


asyncio.run(main())
