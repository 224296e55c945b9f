"""The ``anthropic`` SDK: its tool runner in both thread modes, and the messages API by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anthropic import Anthropic, DefaultHttpxClient, beta_tool, omit
from example import MAX_TOKENS, QUESTION, SCHEMA, Setting, add, tell

setting = Setting()
statuses: list[int] = []
client = Anthropic(
    base_url=setting.anthropic_url,
    api_key=setting.api_key,
    http_client=DefaultHttpxClient(event_hooks={"response": [lambda response: statuses.append(response.status_code)]}),
)
num_texts = 0


def runner(*, threads: bool) -> str:
    """The tool runner; by default it sends only what is new."""
    message = client.beta.messages.tool_runner(
        model=setting.model,
        max_tokens=MAX_TOKENS,
        tools=[beta_tool(add)],
        messages=[{"role": "user", "content": QUESTION}],
        thread=omit if threads else False,
    ).until_done()
    return text_of(message)


def streaming_runner(*, threads: bool) -> str:
    global num_texts
    message: Any = None
    for stream in client.beta.messages.tool_runner(
        model=setting.model,
        max_tokens=MAX_TOKENS,
        tools=[beta_tool(add)],
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        thread=omit if threads else False,
    ):
        num_texts += sum(event.type == "text" for event in stream)
        message = stream.get_final_message()
    return text_of(message)


def by_hand() -> str:
    """The whole history with every request, streamed."""
    global num_texts
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"name": "add", "description": "Adds two whole numbers.", "input_schema": SCHEMA}]
    while True:
        with client.messages.stream(
            model=setting.model, max_tokens=MAX_TOKENS, messages=messages, tools=tools, system="You can add."
        ) as stream:
            num_texts += sum(1 for _ in stream.text_stream)
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return text_of(message)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": add(**block.input)}  # type: ignore[arg-type]
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


MODES: dict[str, Callable[[], str]] = {
    "messages-threads": lambda: runner(threads=True),
    "messages-threads-stream": lambda: streaming_runner(threads=True),
    "messages-history": lambda: runner(threads=False),
    "messages-history-stream": lambda: streaming_runner(threads=False),
    "messages-stream": by_hand,
}

answer = MODES[setting.mode]()
# Where the server forgot a thread, the SDK would silently begin another with the whole history.
assert statuses == [200, 200], statuses
tell(answer, num_texts=num_texts)
