"""Anthropic's bodies: the message, the token count, the error."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from wingbeat.core.errors import WingbeatError
from wingbeat.core.types import FinishReason
from wingbeat.server.calls.dialects.openai import model_name
from wingbeat.server.calls.model_call import Choice, Prepared
from wingbeat.server.http.error_answers import ERROR_TYPES as OPENAI_ERROR_TYPES
from wingbeat.tracking.messages import ToolCall

ERROR_TYPES = {**OPENAI_ERROR_TYPES, 503: "overloaded_error"}
THREAD_LOST = "thread_not_found"
"""With this code Anthropic's SDK sends the whole conversation by itself."""


def message(prepared: Prepared, choice: Choice) -> bytes:
    """The body of an answer that is not streamed; its id is the turn id."""
    return orjson.dumps(
        {
            **opening(prepared, choice.turn_id),
            "content": _content(choice),
            **stop(choice),
            "usage": usage(choice.num_prompt_tokens, len(choice.token_ids)),
        }
    )


def opening(prepared: Prepared, turn_id: str) -> dict[str, Any]:
    """A message before anything of it was said."""
    return {
        "id": turn_id,
        "type": "message",
        "role": "assistant",
        "model": model_name(prepared.call),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(len(prepared.plan.prompt_ids), 0),
    }


def _content(choice: Choice) -> list[dict[str, Any]]:
    reply = choice.reply
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": signature(reply.reasoning)})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [{**tool_use(call), "input": arguments(call)} for call in reply.tool_calls]
    return blocks or [{"type": "text", "text": ""}]


def tool_use(call: ToolCall) -> dict[str, Any]:
    """A block that calls a tool, its input still empty."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def arguments(call: ToolCall) -> orjson.Fragment:
    """The input as JSON, exactly as it was parsed from the sample: numbers of any size survive."""
    return orjson.Fragment(input_json(call))


def input_json(call: ToolCall) -> str:
    """The text of an object, which is the only input this API knows."""
    if isinstance(call.arguments, dict):
        return call.arguments_text
    return orjson.dumps({"arguments": call.arguments_text}).decode()


def signature(thinking: str) -> str:
    """Opaque to clients, who must send it back; we read the thinking and never this."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(), digest_size=24).digest()).decode()


def stop(choice: Choice) -> dict[str, str | None]:
    """Why the turn ended, truthfully."""
    if choice.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.reply.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if choice.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage(num_prompt_tokens: int, num_sampled: int) -> Mapping[str, int]:
    return {
        "input_tokens": num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def token_count(prepared: Prepared) -> bytes:
    return orjson.dumps({"input_tokens": len(prepared.plan.prompt_ids)})


def error_body(error: WingbeatError) -> bytes:
    return orjson.dumps({"type": "error", "error": error_object(error)})


def error_object(error: WingbeatError) -> dict[str, Any]:
    """``code`` and ``param`` are ours; Anthropic's SDK keeps them in ``error.body``."""
    found: dict[str, Any] = {
        "type": ERROR_TYPES.get(error.status, "api_error"),
        "message": error.message,
        "code": error.code,
        "param": error.param,
    }
    if error.status == 404 and error.param == "previous_turn_id":
        found["param"] = "thread.previous_message_id"
        found["details"] = {"error_code": THREAD_LOST}
    return found
