"""``langgraph``'s prebuilt agent over ``langchain-openai`` (chat, responses) and ``langchain-anthropic``."""

from __future__ import annotations

from typing import Any

from example import MAX_TOKENS, QUESTION, Setting, add, tell
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

setting = Setting()
STREAM = setting.mode.endswith("-stream")


def model() -> BaseChatModel:
    common: dict[str, Any] = {
        "model": setting.model,
        "api_key": setting.api_key,
        "max_tokens": MAX_TOKENS,
        "streaming": STREAM,
    }
    if setting.mode.startswith("messages"):
        return ChatAnthropic(base_url=setting.anthropic_url, **common)
    return ChatOpenAI(base_url=setting.base_url, use_responses_api=setting.mode.startswith("responses"), **common)


agent = create_react_agent(model(), [tool(add)], prompt="You can add.")
conversation: Any = {"messages": [{"role": "user", "content": QUESTION}]}
num_texts = 0
if STREAM:
    last: Any = None
    parts: Any = agent.stream(conversation, stream_mode=["messages", "values"])
    for kind, part in parts:
        if kind == "values":
            last = part["messages"][-1]
        else:
            num_texts += part[0].type == "AIMessageChunk" and bool(part[0].text)
else:
    last = agent.invoke(conversation)["messages"][-1]
tell(str(last.text), num_texts=num_texts)
