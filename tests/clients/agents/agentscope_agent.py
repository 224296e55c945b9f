"""``agentscope``: its agent over chat and responses, with and without the clock in the conversation."""

from __future__ import annotations

import asyncio
from typing import Any

from agentscope.agent import Agent, InjectionConfig
from agentscope.credential import OpenAICredential
from agentscope.event import TextBlockDeltaEvent
from agentscope.message import Msg, UserMsg
from agentscope.model import OpenAIChatModel, OpenAIResponseModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from example import MAX_TOKENS, QUESTION, Setting, add, tell
from pydantic import SecretStr

setting = Setting()


async def main() -> None:
    wire: Any = OpenAIResponseModel if setting.mode.startswith("responses") else OpenAIChatModel
    model = wire(
        credential=OpenAICredential(api_key=SecretStr(setting.api_key), base_url=setting.base_url),
        model=setting.model,
        parameters=wire.Parameters(max_tokens=MAX_TOKENS),
        stream=setting.mode.endswith("-stream"),
        context_size=4096,
    )
    tool: Any = add
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="adding is harmless")
    agent = Agent(
        name="adder",
        system_prompt="You can add.",
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(tool, permission=allowed)]),
        injection_config=InjectionConfig(inject_runtime_state="clock" in setting.mode, time_interval=0),
    )
    answer, num_texts = "", 0
    async for event in agent.reply_stream(UserMsg(name="user", content=QUESTION), yield_final_msg=True):
        if isinstance(event, Msg):
            answer = event.get_text_content() or ""
        num_texts += isinstance(event, TextBlockDeltaEvent)
    tell(answer, num_texts=num_texts)


asyncio.run(main())
