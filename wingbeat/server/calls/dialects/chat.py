"""``/v1/chat/completions``: OpenAI's chat completions.

Every field OpenAI documents is in exactly one of the tables below (``docs/reference/chat-fields.md``
publishes them); a field in none of them is refused by name, so that nothing is ignored silently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from wingbeat.core.errors import RequestError, UnsupportedField, WingbeatError
from wingbeat.server.calls.dialects import fields, openai
from wingbeat.server.calls.dialects.blocks import shown
from wingbeat.server.calls.model_call import ChatPrompt, Choice, ModelCall, Prepared, TextDelta, ToolChoice
from wingbeat.server.http.error_answers import error_body
from wingbeat.tracking.messages import Message, parse_messages
from wingbeat.tracking.template import ChatTemplate

HONOURED = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stream", "stream_options"}
    | {"temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "n", "stop", "seed", "logprobs"}
    | {"top_logprobs", "return_token_ids"}
)
NO_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
"""Accepted: they do not change what is sampled here."""
REFUSED_UNLESS = {
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "logit_bias": ({}, None),
    "functions": (None,),
    "function_call": (None,),
    "audio": (None,),
    "modalities": (["text"], None),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
}
"""Refused by name unless they have one of these values, with which they say nothing."""


class ChatDialect:
    """See :class:`wingbeat.server.calls.dialects.base.Dialect`."""

    name = "chat"
    turn_prefix = "chatcmpl-"

    def parse(self, body: Any) -> ModelCall:
        body = fields.body_object(body)
        fields.check_fields(body, honoured=HONOURED, no_effect=NO_EFFECT, refused_unless=REFUSED_UNLESS)
        policy, agent = fields.policy_and_agent(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError("`messages` must be a non-empty list", param="messages")
        tools = fields.chat_tools(body.get("tools"))
        if body.get("top_logprobs"):
            raise UnsupportedField(
                "`top_logprobs` is not supported: only the sampled token's logprob is kept; leave it out",
                param="top_logprobs",
            )
        return ModelCall(
            policy=policy,
            agent=agent,
            prompt=ChatPrompt(parse_messages(messages)),
            tools=tools,
            tool_choice=fields.check_choice(parse_tool_choice(body.get("tool_choice")), tools),
            one_tool_call=body.get("parallel_tool_calls") is not None and not fields.flag(body, "parallel_tool_calls"),
            schema=parse_response_format(body.get("response_format")),
            stream=fields.flag(body, "stream"),
            include_usage=fields.include_usage(body),
            temperature=fields.number(body, "temperature", low=0.0, high=10.0),
            top_p=fields.top_p(body),
            top_k=fields.top_k(body),
            max_tokens=_limit(body),
            n=fields.integer(body, "n", low=1, high=fields.MAX_N) or 1,
            stop=fields.stop_strings(body.get("stop")),
            seed=fields.seed(body),
            logprobs=fields.flag(body, "logprobs"),
            return_token_ids=fields.flag(body, "return_token_ids"),
        )

    def answer(self, prepared: Prepared, choices: Sequence[Choice]) -> bytes:
        """The response id is the turn id of the first choice."""
        call = prepared.call
        return orjson.dumps(
            {
                "id": choices[0].turn_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": openai.model_name(call),
                "choices": [_choice(prepared, choice) for choice in choices],
                "usage": openai.usage(choices),
            }
        )

    def events(self, prepared: Prepared) -> ChatEvents:
        return ChatEvents(prepared)

    def error(self, error: WingbeatError) -> bytes:
        return orjson.dumps(error_body(error))


class ChatEvents:
    """``chat.completion.chunk`` events; tool calls come as one delta at their turn's end."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._frames = openai.Frames("chat.completion.chunk", prepared.call)

    def begin(self, turn_id: str) -> bytes:
        """The role of every choice, before any text."""
        self._frames.response_id = turn_id
        role = {"role": "assistant", "content": ""}
        call = self._prepared.call
        return self._frames.frame(
            [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(call.n)]
        )

    def delta(self, delta: TextDelta) -> bytes:
        name = "content" if delta.kind == "content" else "reasoning_content"
        return self._frames.frame([{"index": delta.index, "delta": {name: delta.text}, "finish_reason": None}])

    def choice(self, choice: Choice) -> bytes:
        call, body = self._prepared.call, {"index": choice.index, "delta": {}, "finish_reason": None}
        if choice.reply.tool_calls:
            calls = tool_calls(choice.reply)
            body["delta"] = {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        if call.logprobs:
            body["logprobs"] = logprobs(choice, self._prepared.host.template)
        body |= token_ids(self._prepared, choice)
        first = self._frames.frame([body]) if body["delta"] or len(body) > 3 else b""
        end = {"index": choice.index, "delta": {}, "finish_reason": openai.finish_reason(choice)}
        return first + self._frames.frame([end])

    def end(self, choices: Sequence[Choice]) -> bytes:
        told = self._frames.frame([], usage=openai.usage(choices)) if self._prepared.call.include_usage else b""
        return told + openai.DONE

    def error(self, error: WingbeatError) -> bytes:
        return openai.error_frame(error)


CHAT = ChatDialect()


# --- the request --------------------------------------------------------------------------------------


def parse_tool_choice(value: Any) -> ToolChoice:
    """``auto``, ``none``, ``required``, a named function, or a list of allowed tools of which one is required."""
    if value in (None, "auto"):
        return ToolChoice()
    if value == "none":
        return ToolChoice("none")
    if value == "required":
        return ToolChoice("required")
    if isinstance(value, dict) and value.get("type") == "function":
        return ToolChoice("required", (_tool_name(value, "tool_choice"),))
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools"))
    raise RequestError(
        '`tool_choice` must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}},'
        f" got {shown(value)}",
        param="tool_choice",
    )


def _tool_name(value: Any, where: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"`{where}.function.name` must be a non-empty string", param="tool_choice")
    return name


def _allowed_tools(value: Any) -> ToolChoice:
    if not isinstance(value, dict) or not isinstance(value.get("tools"), list) or not value["tools"]:
        raise RequestError("`tool_choice.allowed_tools` must have `mode` and `tools`", param="tool_choice")
    if value.get("mode") != "required":
        raise UnsupportedField(
            '`tool_choice.allowed_tools.mode` must be "required": with "auto", send only the tools that are allowed',
            param="tool_choice",
        )
    return ToolChoice("required", tuple(_tool_name(tool, "tool_choice.allowed_tools.tools") for tool in value["tools"]))


def parse_response_format(value: Any) -> dict[str, Any] | None:
    """The schema that the content must match; {} for any JSON object, None for free text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind == "json_schema":
        wanted = value.get("json_schema")
        if not isinstance(wanted, dict) or not isinstance(wanted.get("schema"), dict):
            raise RequestError(
                "`response_format.json_schema` must be an object with a `schema`", param="response_format.json_schema"
            )
        return fields.check_schema(wanted["schema"], "response_format.json_schema.schema")
    raise RequestError(
        f"`response_format.type` must be text, json_object or json_schema, got {shown(value)}", param="response_format"
    )


def _limit(body: Mapping[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens")
    limits = [v for name in names if (v := fields.integer(body, name, low=1, high=fields.MAX_TOKENS))]
    return min(limits, default=None)


# --- the answer ---------------------------------------------------------------------------------------


def _choice(prepared: Prepared, choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": _message(choice.reply),
        "finish_reason": openai.finish_reason(choice),
        "logprobs": logprobs(choice, prepared.host.template) if prepared.call.logprobs else None,
        **token_ids(prepared, choice),
    }


def token_ids(prepared: Prepared, choice: Choice) -> dict[str, Any]:
    """The ids of prompt and reply, for those who asked."""
    if not prepared.call.return_token_ids:
        return {}
    return {"token_ids": choice.token_ids, "prompt_token_ids": prepared.plan.prompt_ids.tolist()}


def _message(reply: Message) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = tool_calls(reply)
    elif message["content"] is None:
        message["content"] = ""
    return message


def tool_calls(reply: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}
        for call in reply.tool_calls
    ]


def logprobs(choice: Choice, template: ChatTemplate) -> dict[str, Any]:
    """Per sampled token; a logprob that the engine could not give is null, never invented."""
    content = []
    for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True):
        text = template.decode([token_id])
        value = logprob if math.isfinite(logprob) else None
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}
