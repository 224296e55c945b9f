"""``smolagents``: its tool-calling agent, which writes calls into texts, and its code agent."""

from __future__ import annotations

from typing import Any

from example import MAX_TOKENS, QUESTION, Setting, add, tell
from smolagents import CodeAgent, FinalAnswerStep, LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessageStreamDelta

setting = Setting()
model = OpenAIModel(model_id=setting.model, api_base=setting.base_url, api_key=setting.api_key, max_tokens=MAX_TOKENS)
kind = CodeAgent if "code" in setting.mode else ToolCallingAgent
STREAM = setting.mode.endswith("-stream")
agent = kind(tools=[tool(add)], model=model, max_steps=3, stream_outputs=STREAM, verbosity_level=LogLevel.OFF)
if STREAM:
    num_texts = 0
    steps: Any = agent.run(QUESTION, stream=True)
    for step in steps:
        num_texts += isinstance(step, ChatMessageStreamDelta) and bool(step.content)
        if isinstance(step, FinalAnswerStep):
            tell(str(step.output), num_texts=num_texts)
else:
    tell(str(agent.run(QUESTION)))
