"""Valid requests of every dialect, as real clients send them: what the fuzzer mutates."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}, "index": 0}

CHAT: list[Any] = [
    {"model": "solver", "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "solver:agent",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": "add", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so", "refusal": None},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ],
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 9,
        "stop": ["Observation:"],
        "seed": 3,
        "n": 2,
        "logprobs": True,
    },
    {
        "model": "solver",
        "messages": [{"role": "user", "content": "json"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA, "strict": True}},
        "max_tokens": 5,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
    },
]
COMPLETIONS: list[Any] = [
    {"model": "solver", "prompt": "once upon", "max_tokens": 4, "logprobs": 1, "echo": False, "stop": "\n"},
    {"model": "solver", "prompt": [1, 2, 3], "return_token_ids": True, "stream": True, "n": 2},
    {"model": "solver", "prompt": ["one text"], "top_p": 0.5, "seed": 1},
]
RESPONSES: list[Any] = [
    {"model": "solver", "input": "hi", "instructions": "be brief", "stream": True},
    {
        "model": "solver",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "2"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "include": [],
        "max_output_tokens": 7,
        "store": False,
    },
    {
        "model": "solver",
        "previous_response_id": "resp_1",
        "input": [{"type": "function_call_output", "call_id": "call_1", "output": "2"}],
        "text": {"format": {"type": "json_schema", "name": "o", "schema": SCHEMA}},
    },
]
MESSAGES: list[Any] = [
    {"model": "solver", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "solver",
        "max_tokens": 128000,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "add"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "s"},
                    {"type": "text", "text": "I add"},
                    {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2"}]}
                ],
            },
        ],
        "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "stream": True,
        "top_k": 5,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    {
        "model": "solver",
        "max_tokens": 10,
        "thread": {"type": "continue", "previous_message_id": "msg_1"},
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2"}]}],
    },
]
