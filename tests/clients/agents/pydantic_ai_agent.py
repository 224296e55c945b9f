"""``pydantic-ai`` over chat, responses and messages."""

from __future__ import annotations

import asyncio

from example import MAX_TOKENS, QUESTION, Setting, add, tell
from pydantic_ai import Agent, AgentRunResultEvent, PartDeltaEvent, TextPartDelta
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

setting = Setting()


def model() -> Model:
    if setting.mode.startswith("messages"):
        return AnthropicModel(
            setting.model, provider=AnthropicProvider(base_url=setting.anthropic_url, api_key=setting.api_key)
        )
    wire = OpenAIResponsesModel if setting.mode.startswith("responses") else OpenAIChatModel
    return wire(setting.model, provider=OpenAIProvider(base_url=setting.base_url, api_key=setting.api_key))


async def main() -> None:
    agent = Agent(model(), instructions="You can add.", tools=[add], model_settings={"max_tokens": MAX_TOKENS})
    if not setting.mode.endswith("-stream"):
        tell((await agent.run(QUESTION)).output, num_texts=0)
        return
    answer, num_texts = "", 0
    async with agent.run_stream_events(QUESTION) as events:
        async for event in events:
            if isinstance(event, AgentRunResultEvent):
                answer = event.result.output
            elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
                num_texts += 1
    tell(answer, num_texts=num_texts)


asyncio.run(main())
