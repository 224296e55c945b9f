"""OpenAI response bodies from choices.  Pure; bytes out, because this is the hot path."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from wingbeat.core.errors import WingbeatError
from wingbeat.core.types import FinishReason
from wingbeat.server.gateway import Choice, Prepared, TextDelta
from wingbeat.tracking.messages import Message
from wingbeat.tracking.template import ChatTemplate

DONE = b"data: [DONE]\n\n"

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(error: WingbeatError) -> dict[str, Any]:
    """The one error shape (``ErrorReply``)."""
    return {
        "error": {
            "message": error.message,
            "type": ERROR_TYPES.get(error.status, "server_error"),
            "code": error.code,
            "param": error.param,
        }
    }


def error_response(error: WingbeatError, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer of an error."""
    return Response(orjson.dumps(error_body(error)), error.status, headers, media_type="application/json")


def completion(prepared: Prepared, choices: list[Choice]) -> bytes:
    """The body of a non-streaming answer; its id is the turn id of the first choice."""
    return orjson.dumps(
        {
            "id": choices[0].turn_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": _model(prepared),
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice.reply),
                    "finish_reason": _finish(choice),
                    "logprobs": _logprobs(choice, prepared.host.template) if prepared.call.logprobs else None,
                }
                for choice in choices
            ],
            "usage": _usage(choices),
        }
    )


def first_event(prepared: Prepared, turn_id: str) -> bytes:
    """The role of every choice, before any text."""
    return _event(
        prepared,
        turn_id,
        [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for i in range(prepared.call.n)
        ],
    )


def delta_event(prepared: Prepared, delta: TextDelta, turn_id: str) -> bytes:
    return _event(prepared, turn_id, [{"index": delta.index, "delta": {"content": delta.text}, "finish_reason": None}])


def choice_events(prepared: Prepared, choice: Choice, turn_id: str) -> bytes:
    """What only the end tells: reasoning, tool calls, logprobs, the finish reason."""
    delta: dict[str, Any] = {}
    message = _message(choice.reply)
    if choice.reply.reasoning:
        delta["reasoning_content"] = choice.reply.reasoning
    if choice.reply.tool_calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
    body: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": None}
    if prepared.call.logprobs:
        body["logprobs"] = _logprobs(choice, prepared.host.template)
    end = {"index": choice.index, "delta": {}, "finish_reason": _finish(choice)}
    first = _event(prepared, turn_id, [body]) if delta or prepared.call.logprobs else b""
    return first + _event(prepared, turn_id, [end])


def usage_event(prepared: Prepared, choices: list[Choice], turn_id: str) -> bytes:
    return _event(prepared, turn_id, [], usage=_usage(choices))


def error_event(error: WingbeatError) -> bytes:
    """An error after streaming began: OpenAI clients raise on an ``error`` object."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


def _event(
    prepared: Prepared, turn_id: str, choices: list[dict[str, Any]], *, usage: dict[str, int] | None = None
) -> bytes:
    body: dict[str, Any] = {
        "id": turn_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": _model(prepared),
        "choices": choices,
    }
    if usage is not None:
        body["usage"] = usage
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _model(prepared: Prepared) -> str:
    return f"{prepared.call.policy}:{prepared.call.agent}" if prepared.call.agent else prepared.call.policy


def _message(reply: Message) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}
            for call in reply.tool_calls
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


def _finish(choice: Choice) -> str:
    if choice.finish_reason is FinishReason.STOP and choice.reply.tool_calls:
        return "tool_calls"
    return "length" if choice.finish_reason is FinishReason.LENGTH else "stop"


def _logprobs(choice: Choice, template: ChatTemplate) -> dict[str, Any]:
    """Per sampled token; a logprob that the engine could not give is null, never invented."""
    content = []
    for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True):
        text = template.decode([token_id])
        value = logprob if math.isfinite(logprob) else None
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _usage(choices: list[Choice]) -> dict[str, int]:
    prompt = choices[0].num_prompt_tokens
    sampled = sum(len(c.token_ids) for c in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
