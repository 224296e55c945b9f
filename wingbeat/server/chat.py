"""The ``/v1/chat/completions`` dialect as pure functions: JSON body to :class:`ChatCall`, and back.

Every field OpenAI documents is in exactly one of the tables below (``docs/reference/chat-fields.md``
publishes them); a field in none of them is refused by name, so that nothing is ignored silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jsonschema
import orjson

from wingbeat.core.errors import InvalidToolSchema, RequestError, UnsupportedField

HONOURED = frozenset(
    {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "temperature", "top_p", "max_tokens"}
    | {"max_completion_tokens", "n", "stop", "seed", "logprobs", "top_logprobs", "response_format"}
)
NO_EFFECT = frozenset(
    {"user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier", "verbosity"}
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
    "top_k": (None, 0, -1),
}
"""Refused by name unless they have one of these values, with which they say nothing."""
MAX_N = 64


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One validated request in our terms."""

    policy: str
    agent: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    stream: bool
    include_usage: bool
    temperature: float | None
    top_p: float
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool


def parse_chat(body: Any) -> ChatCall:
    """Validate a decoded JSON body.  Raises RequestError (400) that names the field and the fix."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    _check_fields(body)
    policy, _, agent = _string(body, "model").partition(":")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("`messages` must be a non-empty list", param="messages")
    tools = _tools(body.get("tools"))
    _check_choice(body.get("tool_choice"))
    if body.get("tool_choice") == "none":
        tools = None
    _check_format(body.get("response_format"))
    options = body.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise RequestError("`stream_options` must be an object", param="stream_options")
    if body.get("top_logprobs"):
        raise UnsupportedField(
            "`top_logprobs` is not supported: only the sampled token's logprob is kept; leave it out",
            param="top_logprobs",
        )
    return ChatCall(
        policy=policy,
        agent=agent,
        messages=messages,
        tools=tools,
        stream=_flag(body, "stream"),
        include_usage=bool(options.get("include_usage")),
        temperature=_number(body, "temperature", low=0.0, high=10.0),
        top_p=_number(body, "top_p", low=0.0, high=1.0, low_open=True) or 1.0,
        max_tokens=_limit(body),
        n=_integer(body, "n", low=1, high=MAX_N) or 1,
        stop=_stop(body.get("stop")),
        seed=_integer(body, "seed", low=-(2**63), high=2**63 - 1),
        logprobs=_flag(body, "logprobs"),
    )


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in HONOURED or name in NO_EFFECT:
            continue
        if name not in REFUSED_UNLESS:
            raise UnsupportedField(f"unknown field `{name}`; leave it out", param=name)
        if isinstance(value, bool) or value not in REFUSED_UNLESS[name]:
            raise UnsupportedField(
                f"`{name}` would change what is sampled and is not supported; leave it out", param=name
            )


def _string(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"`{name}` must be a non-empty string, got {value!r}", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` must be true or false, got {value!r}", param=name)
    return value


def _number(body: Mapping[str, Any], name: str, *, low: float, high: float, low_open: bool = False) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"`{name}` must be a finite number, got {value!r}", param=name)
    if value > high or value < low or (low_open and value == low):
        raise RequestError(f"`{name}` must be between {low:g} and {high:g}, got {value!r}", param=name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, *, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"`{name}` must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise RequestError(f"`{name}` must be between {low} and {high}, got {value}", param=name)
    return value


def _limit(body: Mapping[str, Any]) -> int | None:
    limits = [v for name in ("max_completion_tokens", "max_tokens") if (v := _integer(body, name, low=1, high=2**31))]
    return min(limits, default=None)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > 16:
        raise RequestError("`stop` must be a non-empty string or a list of up to 16 of them", param="stop")
    return tuple(stops)


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RequestError("`tools` must be a list", param="tools")
    for index, tool in enumerate(value):
        _check_tool(tool, f"tools[{index}]")
    return value


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise RequestError(f'`{where}` must be {{"type": "function", "function": {{...}}}}', param=where)
    function = tool["function"]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"`{where}.function.name` must be a non-empty string", param=where)
    schema = function.get("parameters")
    if schema is None:
        return
    try:
        fault = _schema_fault(orjson.dumps(schema))
    except orjson.JSONEncodeError:
        fault = "it is nested too deeply or holds numbers that JSON cannot"
    if fault:
        raise InvalidToolSchema(
            f"`{where}.function.parameters` is no JSON schema: {fault}", param=f"{where}.function.parameters"
        )
    if not isinstance(schema, dict):
        raise InvalidToolSchema(
            f"`{where}.function.parameters` must be an object schema, got {schema!r}",
            param=f"{where}.function.parameters",
        )


@lru_cache(maxsize=4096)
def _schema_fault(schema: bytes) -> str:
    """What is wrong with a JSON schema, or "".  Cached: agents send the same tools with every turn."""
    try:
        jsonschema.Draft202012Validator.check_schema(orjson.loads(schema))
    except jsonschema.SchemaError as error:
        return error.message
    except RecursionError:
        return "it is nested too deeply; flatten it"
    return ""


def _check_choice(choice: Any) -> None:
    if choice in (None, "auto", "none"):
        return
    if choice == "required" or isinstance(choice, dict):
        raise UnsupportedField(
            "`tool_choice` required or named needs grammar-constrained sampling, which this release does not have;"
            ' use "auto"',
            param="tool_choice",
        )
    raise RequestError(f'`tool_choice` must be "auto" or "none", got {choice!r}', param="tool_choice")


def _check_format(value: Any) -> None:
    if value is None or value == {"type": "text"}:
        return
    raise UnsupportedField(
        "`response_format` other than text needs grammar-constrained sampling, which this release does not have",
        param="response_format",
    )
