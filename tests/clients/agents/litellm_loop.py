"""``litellm`` by hand over each of its routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import litellm
from example import MAX_TOKENS, QUESTION, SCHEMA, Setting, call_add, tell

setting = Setting()
STREAM = setting.mode.endswith("-stream")
FUNCTION = {"name": "add", "description": "Adds two whole numbers.", "parameters": SCHEMA}
num_texts = 0


def chat(provider: str, base_url: str) -> str:
    """``litellm.completion``: chat, or Anthropic's messages behind the same face."""
    global num_texts
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        wanted: dict[str, Any] = {
            "model": f"{provider}/{setting.model}",
            "api_base": base_url,
            "api_key": setting.api_key,
            "messages": messages,
            "tools": [{"type": "function", "function": FUNCTION}],
            # Without `max_tokens` the Anthropic route asks for as many as litellm believes the model has.
            **({"max_tokens": MAX_TOKENS} if provider == "openai" else {}),
        }
        if STREAM:
            chunks = list(litellm.completion(**wanted, stream=True))
            num_texts += sum(bool(c.choices and c.choices[0].delta.content) for c in chunks)
            whole: Any = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            whole = litellm.completion(**wanted)
        reply = whole.choices[0].message
        messages.append(reply.model_dump())
        if not reply.tool_calls:
            return reply.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": call_add(call.function.arguments)}
            for call in reply.tool_calls
        ]


def responses() -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        response: Any = litellm.responses(
            model=f"openai/{setting.model}",
            api_base=setting.base_url,
            api_key=setting.api_key,
            input=items,
            tools=[{"type": "function", **FUNCTION}],
            max_output_tokens=MAX_TOKENS,
        )
        calls = [item for item in response.output if item.type == "function_call"]
        items += [item if isinstance(item, dict) else item.model_dump() for item in response.output]
        if not calls:
            return "".join(part.text for item in response.output if item.type == "message" for part in item.content)
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": call_add(call.arguments)}
            for call in calls
        ]


def responses_as_messages() -> str:
    """Anthropic's face on an OpenAI model: litellm calls the responses API."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        message: Any = asyncio.run(
            litellm.anthropic.messages.acreate(  # type: ignore[attr-defined]
                model=f"openai/{setting.model}",
                api_base=setting.base_url,
                api_key=setting.api_key,
                messages=messages,
                tools=[{"name": "add", "description": "Adds two whole numbers.", "input_schema": SCHEMA}],
                max_tokens=MAX_TOKENS,
            )
        )
        blocks = [block if isinstance(block, dict) else block.model_dump() for block in message["content"]]
        messages.append({"role": "assistant", "content": blocks})
        uses = [block for block in blocks if block["type"] == "tool_use"]
        if not uses:
            return "".join(block["text"] for block in blocks if block["type"] == "text")
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": str(use["input"]["a"] + use["input"]["b"])}
            for use in uses
        ]
        messages.append({"role": "user", "content": results})


def completions() -> str:
    prompt = f"Question: {QUESTION}\n"
    return complete(f"{prompt}{complete(prompt)}\nThe tool says: 5\n")


def complete(prompt: str) -> str:
    done: Any = litellm.text_completion(
        model=f"text-completion-openai/{setting.model}",
        api_base=setting.base_url,
        api_key=setting.api_key,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
    )
    return done.choices[0].text


MODES: dict[str, Callable[[], str]] = {
    "chat": lambda: chat("openai", setting.base_url),
    "chat-stream": lambda: chat("openai", setting.base_url),
    "responses": responses,
    "messages": lambda: chat("anthropic", setting.anthropic_url),
    "messages-stream": lambda: chat("anthropic", setting.anthropic_url),
    "responses-as-messages": responses_as_messages,
    "completions": completions,
}

tell(MODES[setting.mode](), num_texts=num_texts)
