"""Response objects, their output items, and errors."""

from __future__ import annotations

import time
from typing import Any

from wingbeat.core.errors import WingbeatError
from wingbeat.core.types import FinishReason
from wingbeat.server.calls.dialects import openai
from wingbeat.server.calls.dialects.chat import logprobs as chat_logprobs
from wingbeat.server.calls.dialects.responses.items import encrypt_reasoning
from wingbeat.server.calls.dialects.responses.parse import ResponsesCall
from wingbeat.server.calls.model_call import Choice, Prepared
from wingbeat.server.http.error_answers import error_body as openai_error_body
from wingbeat.tracking.messages import ToolCall

PREFIX = "resp_"
Item = dict[str, Any]


def responses_call(prepared: Prepared) -> ResponsesCall:
    """The call as this dialect parsed it."""
    assert isinstance(prepared.call, ResponsesCall)
    return prepared.call


def started(prepared: Prepared, turn_id: str, *, created_at: int) -> dict[str, Any]:
    """A response before anything of it was sampled."""
    call, sampling = responses_call(prepared), prepared.sampling
    return {
        "id": turn_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": openai.model_name(call),
        "output": [],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "usage": None,
        **call.echo,
    }


def finished(prepared: Prepared, choice: Choice, *, created_at: int | None = None) -> dict[str, Any]:
    """The whole response; ``incomplete`` where the limit of tokens ended it."""
    now = int(time.time())
    response = started(prepared, choice.turn_id, created_at=now if created_at is None else created_at)
    response |= {"status": status(choice), "output": output(prepared, choice), "usage": _usage(choice)}
    if is_cut(choice):
        return response | {"incomplete_details": {"reason": "max_output_tokens"}}
    return response | {"completed_at": now}


def is_cut(choice: Choice) -> bool:
    return choice.finish_reason is FinishReason.LENGTH


def status(choice: Choice) -> str:
    return "incomplete" if is_cut(choice) else "completed"


def output(prepared: Prepared, choice: Choice) -> list[Item]:
    """Reasoning, text, function calls: a call is only told where it is whole, the rest may have been cut."""
    reply = choice.reply
    items: list[Item] = []
    if reply.reasoning:
        items.append(reasoning_item(prepared, choice.turn_id, reply.reasoning))
    if reply.content or not (reply.reasoning or reply.tool_calls):
        items.append(message_item(prepared, choice))
    if not reply.tool_calls:
        items[-1]["status"] = status(choice)
    return items + [function_item(call) for call in reply.tool_calls]


def reasoning_item(prepared: Prepared, turn_id: str, text: str) -> Item:
    item: Item = {
        "type": "reasoning",
        "id": item_id("rs_", turn_id),
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": "completed",
    }
    if responses_call(prepared).encrypted_reasoning:
        item["encrypted_content"] = encrypt_reasoning(text)
    return item


def message_item(prepared: Prepared, choice: Choice) -> Item:
    return {
        "type": "message",
        "id": item_id("msg_", choice.turn_id),
        "role": "assistant",
        "status": "completed",
        "content": [text_part(choice.reply.content, token_logprobs(prepared, choice))],
    }


def text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def token_logprobs(prepared: Prepared, choice: Choice) -> list[dict[str, Any]]:
    """Of every sampled token of the turn, for those who asked."""
    return chat_logprobs(choice, prepared.host.template)["content"] if prepared.call.logprobs else []


def function_item(call: ToolCall) -> Item:
    return {
        "type": "function_call",
        "id": f"fc_{call.id.removeprefix('call_')}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments_text,
        "status": "completed",
    }


def item_id(prefix: str, turn_id: str) -> str:
    """Unique, because the turn's is."""
    return prefix + turn_id.removeprefix(PREFIX)


def _usage(choice: Choice) -> dict[str, Any]:
    """Tokens of reasoning are not told apart: they count as output, and their own count reads 0."""
    prompt, sampled = choice.num_prompt_tokens, len(choice.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def error_body(error: WingbeatError) -> dict[str, Any]:
    """OpenAI's shape; a response that is not of this episode has OpenAI's own code."""
    body = openai_error_body(error)
    if error.status == 404 and error.param == "previous_turn_id":
        body["error"] |= {"code": "previous_response_not_found", "param": "previous_response_id"}
    return body
