"""``autogen``: its assistant, which ends with a reflection on what the tool said."""

from __future__ import annotations

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from example import MAX_TOKENS, QUESTION, Setting, add, tell

setting = Setting()


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=setting.model,
        base_url=setting.base_url,
        api_key=setting.api_key,
        max_tokens=MAX_TOKENS,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "family": "unknown",
            "structured_output": False,
        },
    )
    reflect = "reflect" in setting.mode
    agent = AssistantAgent(
        "adder",
        client,
        tools=[add],
        system_message="You can add.",
        reflect_on_tool_use=reflect,
        max_tool_iterations=1 if reflect else 3,
        model_client_stream=setting.mode.endswith("-stream"),
    )
    answer, num_texts = "", 0
    async for event in agent.run_stream(task=QUESTION):
        if isinstance(event, TaskResult):
            answer = event.messages[-1].to_text()
        num_texts += isinstance(event, ModelClientStreamingChunkEvent)
    await client.close()
    tell(answer, num_texts=num_texts)


asyncio.run(main())
