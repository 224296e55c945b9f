"""What the bodies of model calls look like, as JSON schemas for the OpenAPI description.

Written for people and for generators: which fields there are and of which type.  The parsers are the authority, and
say what is wrong with a body in words; a test checks that both know the same fields.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": ["boolean", "null"]}
COUNT: Schema = {"type": ["integer", "null"], "minimum": 1}
SHARE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
TEMPERATURE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 10}
ANYTHING: Schema = {}
OBJECT: Schema = {"type": "object"}
MODEL: Schema = {"type": "string", "description": "POLICY or POLICY:AGENT, one of the episode's policies."}
STOP: Schema = {
    "anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 16}, {"type": "null"}],
}
OPENAI_CALL: dict[str, Schema] = {
    "model": MODEL,
    "stream": FLAG,
    "stream_options": ANYTHING,
    "temperature": TEMPERATURE,
    "top_p": SHARE,
    "top_k": COUNT,
    "max_tokens": COUNT,
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 64},
    "stop": STOP,
    "seed": {"type": ["integer", "null"]},
    "return_token_ids": FLAG,
}
"""What chat and text completions have in common."""


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(item: Schema, **bounds: Any) -> Schema:
    return {"type": "array", "items": item, **bounds}


def _parts(*kinds: str) -> Schema:
    """Text, or a list of text parts."""
    part = _object(("type", "text"), type={"enum": list(kinds)}, text=TEXT)
    return {"anyOf": [TEXT, _list(part)]}


FUNCTION: dict[str, Schema] = {"name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG}
CHAT_TOOL = _object(("type", "function"), type={"const": "function"}, function=_object(("name",), **FUNCTION))
RESPONSE_TOOL = _object(("type", "name"), type={"const": "function"}, **FUNCTION)
CHAT_CALL = _object(
    ("id", "type", "function"),
    id=TEXT,
    type={"const": "function"},
    function=_object(("name", "arguments"), name=TEXT, arguments=TEXT),
)
CHAT_MESSAGE: Schema = {
    "anyOf": [
        _object(("role", "content"), role={"enum": ["system", "developer", "user"]}, content=_parts("text")),
        _object(("role",), role={"const": "assistant"}, content=_parts("text"), tool_calls=_list(CHAT_CALL)),
        _object(("role", "content", "tool_call_id"), role={"const": "tool"}, content=_parts("text"), tool_call_id=TEXT),
    ]
}
CHAT = _object(
    ("model", "messages"),
    messages=_list(CHAT_MESSAGE, minItems=1),
    tools=_list(CHAT_TOOL),
    tool_choice=ANYTHING,
    parallel_tool_calls=FLAG,
    response_format=ANYTHING,
    max_completion_tokens=COUNT,
    logprobs=FLAG,
    top_logprobs={"enum": [0, None]},
    **OPENAI_CALL,
)
COMPLETION = _object(
    ("model", "prompt"),
    prompt={"anyOf": [TEXT, _list({"type": "integer", "minimum": 0}, minItems=1)]},
    logprobs={"enum": [0, 1, None]},
    **OPENAI_CALL,
)
RESPONSE_ITEM: Schema = {
    "anyOf": [
        _object(
            ("role", "content"),
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_parts("input_text", "output_text"),
        ),
        _object(
            ("type", "call_id", "name", "arguments"),
            type={"const": "function_call"},
            call_id=TEXT,
            name=TEXT,
            arguments=TEXT,
        ),
        _object(
            ("type", "call_id", "output"),
            type={"const": "function_call_output"},
            call_id=TEXT,
            output=_parts("input_text"),
        ),
    ]
}
RESPONSE = _object(
    ("model", "input"),
    model=MODEL,
    input={"anyOf": [TEXT, _list(RESPONSE_ITEM, minItems=1)]},
    instructions={"type": ["string", "null"]},
    previous_response_id={"type": ["string", "null"]},
    tools=_list(RESPONSE_TOOL),
    tool_choice=ANYTHING,
    parallel_tool_calls=FLAG,
    text=ANYTHING,
    stream=FLAG,
    temperature=TEMPERATURE,
    top_p=SHARE,
    max_output_tokens=COUNT,
    top_logprobs={"enum": [0, None]},
    include=_list({"enum": ["reasoning.encrypted_content", "message.output_text.logprobs"]}),
    reasoning=ANYTHING,
    background={"enum": [False, None]},
)
BLOCK: Schema = {
    "anyOf": [
        _object(("type", "text"), type={"const": "text"}, text=TEXT),
        _object(("type", "id", "name", "input"), type={"const": "tool_use"}, id=TEXT, name=TEXT, input=OBJECT),
        _object(
            ("type", "tool_use_id", "content"),
            type={"const": "tool_result"},
            tool_use_id=TEXT,
            content=_parts("text"),
        ),
    ]
}
MESSAGE = _object(
    ("model", "messages", "max_tokens"),
    model=MODEL,
    messages=_list(
        _object(
            ("role", "content"),
            role={"enum": ["user", "assistant", "system"]},
            content={"anyOf": [TEXT, _list(BLOCK, minItems=1)]},
        ),
        minItems=1,
    ),
    system=_parts("text"),
    max_tokens={"type": "integer", "minimum": 1},
    tools=_list(_object(("name", "input_schema"), name=TEXT, description=TEXT, input_schema=OBJECT, strict=FLAG)),
    tool_choice=ANYTHING,
    thread=ANYTHING,
    output_config=ANYTHING,
    stream=FLAG,
    stop_sequences=_list(TEXT, maxItems=16),
    temperature=TEMPERATURE,
    top_p=SHARE,
    top_k=COUNT,
)

BODIES: dict[str, Schema] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {**MESSAGE, "required": ["model", "messages"]},
}
CHAT_ANSWER = _object(
    ("id", "object", "model", "choices", "usage"),
    id=TEXT,
    object=TEXT,
    model=TEXT,
    choices=_list(_object(("index", "finish_reason"), index={"type": "integer"}, finish_reason=TEXT), minItems=1),
    usage=OBJECT,
)
ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": CHAT_ANSWER,
    "/v1/completions": CHAT_ANSWER,
    "/v1/responses": _object(
        ("id", "object", "status", "output"), id=TEXT, object={"const": "response"}, status=TEXT, output=_list(OBJECT)
    ),
    "/v1/messages": _object(
        ("id", "type", "role", "content", "stop_reason", "usage"),
        id=TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        content=_list(OBJECT),
        stop_reason=TEXT,
        usage=OBJECT,
    ),
    "/v1/messages/count_tokens": _object(("input_tokens",), input_tokens={"type": "integer", "minimum": 1}),
    "/v1/models": _object(("object", "data"), object={"const": "list"}, data=_list(OBJECT)),
    "/v1/models/{model}": _object(("id", "object"), id=TEXT, object={"const": "model"}),
}
