"""The ``openai`` SDK by hand: chat and responses with a tool, completions as two text turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from example import MAX_TOKENS, QUESTION, SCHEMA, Arguments, Setting, call_add, tell
from openai import OpenAI, pydantic_function_tool

setting = Setting()
client = OpenAI(base_url=setting.base_url, api_key=setting.api_key)

CHAT_TOOLS: Any = [pydantic_function_tool(Arguments, name="add")]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": "add", "description": "Adds two whole numbers.", "parameters": SCHEMA, "strict": True}
]


def chat(ask: Callable[[list[Any]], Any]) -> str:
    """The agent loop of the chat API; ``ask`` returns the assistant's message."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        reply = ask(messages)
        messages.append(reply)
        calls = reply["tool_calls"] if isinstance(reply, dict) else reply.tool_calls
        if not calls:
            return reply["content"] if isinstance(reply, dict) else reply.content
        for call in calls:
            call_id, arguments = (
                (call["id"], call["function"]["arguments"])
                if isinstance(call, dict)
                else (call.id, call.function.arguments)
            )
            messages.append({"role": "tool", "tool_call_id": call_id, "content": call_add(arguments)})


def ask_whole(messages: list[Any]) -> Any:
    completion = client.chat.completions.create(
        model=setting.model, messages=messages, tools=CHAT_TOOLS, max_completion_tokens=MAX_TOKENS
    )
    return completion.choices[0].message


def ask_helper(messages: list[Any]) -> Any:
    """The SDK's own accumulator, whose messages have more keys than were sent."""
    with client.chat.completions.stream(
        model=setting.model, messages=messages, tools=CHAT_TOOLS, max_tokens=MAX_TOKENS
    ) as stream:
        count_texts(sum(event.type == "content.delta" for event in stream))
        return stream.get_final_completion().choices[0].message


def ask_chunks(messages: list[Any]) -> Any:
    """Chunks put together by hand, with usage."""
    content, reasoning, usage = "", "", None
    calls: dict[int, dict[str, Any]] = {}
    chunks = client.chat.completions.create(
        model=setting.model,
        messages=messages,
        tools=CHAT_TOOLS,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            count_texts(bool(choice.delta.content))
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or ():
                blank = {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part.index, blank)
                if part.function is not None:
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
    assert usage is not None, "no usage although it was asked for"
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": list(calls.values()) or None,
    }


def responses(*, stream: bool, previous: bool) -> str:
    """The agent loop of the responses API: the whole history, or only what is new."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    wanted: dict[str, Any] = {"model": setting.model, "tools": RESPONSES_TOOLS, "max_output_tokens": MAX_TOKENS}
    while True:
        if stream:
            with client.responses.stream(input=items, **wanted) as events:
                count_texts(sum(event.type == "response.output_text.delta" for event in events))
                response = events.get_final_response()
        else:
            response = client.responses.create(input=items, **wanted)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": call_add(call.arguments)}
            for call in calls
        ]
        if previous:
            items, wanted["previous_response_id"] = outputs, response.id
        else:
            items = [*items, *response.output, *outputs]


def completions(*, stream: bool) -> str:
    """Two text turns: what the tool said is simply appended."""
    prompt = f"Question: {QUESTION}\n"
    first = complete(prompt, stream=stream)
    return complete(f"{prompt}{first}\nThe tool says: 5\n", stream=stream)


def complete(prompt: str, *, stream: bool) -> str:
    if not stream:
        done = client.completions.create(model=setting.model, prompt=prompt, max_tokens=MAX_TOKENS)
        return done.choices[0].text
    text = ""
    for chunk in client.completions.create(model=setting.model, prompt=prompt, max_tokens=MAX_TOKENS, stream=True):
        count_texts(bool(chunk.choices and chunk.choices[0].text))
        text += chunk.choices[0].text if chunk.choices else ""
    return text


num_texts = 0


def count_texts(number: int) -> None:
    global num_texts
    num_texts += number


MODES: dict[str, Callable[[], str]] = {
    "chat": lambda: chat(ask_whole),
    "chat-helper-stream": lambda: chat(ask_helper),
    "chat-chunks-stream": lambda: chat(ask_chunks),
    "responses": lambda: responses(stream=False, previous=False),
    "responses-stream": lambda: responses(stream=True, previous=False),
    "responses-previous": lambda: responses(stream=False, previous=True),
    "responses-previous-stream": lambda: responses(stream=True, previous=True),
    "completions": lambda: completions(stream=False),
    "completions-stream": lambda: completions(stream=True),
}

tell(MODES[setting.mode](), num_texts=num_texts)
