"""What OpenAI's chat and text completions have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from wingbeat.core.errors import WingbeatError
from wingbeat.core.types import FinishReason
from wingbeat.server.calls.model_call import Choice, ModelCall
from wingbeat.server.http.error_answers import error_body

DONE = b"data: [DONE]\n\n"


def model_name(call: ModelCall) -> str:
    """As the caller spelt it."""
    return f"{call.policy}:{call.agent}" if call.agent else call.policy


def finish_reason(choice: Choice) -> str:
    if choice.finish_reason is FinishReason.STOP and choice.reply.tool_calls:
        return "tool_calls"
    return "length" if choice.finish_reason is FinishReason.LENGTH else "stop"


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """The prompt counts once, however many choices were sampled from it."""
    prompt = choices[0].num_prompt_tokens
    sampled = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


class Frames:
    """Server-sent events of one answer; its id and time are the same in all of them."""

    def __init__(self, kind: str, call: ModelCall) -> None:
        self.response_id = ""
        self._head = {"object": kind, "created": int(time.time()), "model": model_name(call)}

    def frame(self, choices: list[dict[str, Any]], **more: dict[str, int]) -> bytes:
        return b"data: " + orjson.dumps({"id": self.response_id, **self._head, "choices": choices, **more}) + b"\n\n"


def error_frame(error: WingbeatError) -> bytes:
    """An error after streaming began: OpenAI's clients raise on an ``error`` object."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
