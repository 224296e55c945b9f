"""Validators that all dialects share.  Each raises a RequestError that names the field at fault and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import jsonschema
import orjson

from wingbeat.core.errors import InvalidToolSchema, RequestError, UnsupportedField
from wingbeat.core.suggestions import did_you_mean
from wingbeat.server.calls.dialects.blocks import as_list, as_text, shown
from wingbeat.server.calls.model_call import ToolChoice

MAX_N = 64
MAX_STOPS = 16
MAX_TOKENS = 2**31

JsonObject = dict[str, Any]


def body_object(body: Any) -> JsonObject:
    """The decoded body, which must be an object."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def check_fields(
    body: Mapping[str, Any],
    *,
    honoured: Collection[str],
    no_effect: Collection[str],
    refused_unless: Mapping[str, Collection[Any]],
) -> None:
    """Every field stands in one of a dialect's three tables, so that nothing is ignored silently."""
    for name, value in body.items():
        if name in honoured or name in no_effect:
            continue
        if name not in refused_unless:
            hint = did_you_mean(name, {*honoured, *no_effect}, quote="`")
            raise UnsupportedField(f"unknown field `{name}`; {hint or 'leave it out'}", param=name)
        if isinstance(value, bool) or value not in refused_unless[name]:
            raise UnsupportedField(
                f"`{name}` would change what is sampled and is not supported; leave it out", param=name
            )


def policy_and_agent(body: Mapping[str, Any]) -> tuple[str, str]:
    """``model`` is ``POLICY`` or ``POLICY:AGENT``."""
    policy, _, agent = string(body, "model").partition(":")
    return policy, agent


def string(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"`{name}` must be a non-empty string, got {shown(value)}", param=name)
    return as_text(value, name)


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` must be true or false, got {shown(value)}", param=name)
    return value


def number(body: Mapping[str, Any], name: str, *, low: float, high: float, low_open: bool = False) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"`{name}` must be a finite number, got {shown(value)}", param=name)
    if value > high or value < low or (low_open and value == low):
        raise RequestError(f"`{name}` must be between {low:g} and {high:g}, got {shown(value)}", param=name)
    return float(value)


def integer(body: Mapping[str, Any], name: str, *, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"`{name}` must be an integer, got {shown(value)}", param=name)
    if not low <= value <= high:
        raise RequestError(f"`{name}` must be between {low} and {high}, got {value}", param=name)
    return value


def seed(body: Mapping[str, Any]) -> int | None:
    return integer(body, "seed", low=-(2**63), high=2**63 - 1)


def top_k(body: Mapping[str, Any]) -> int:
    """0, the default, switches it off; so does -1, as some clients spell it."""
    return max(integer(body, "top_k", low=-1, high=2**31) or 0, 0)


def top_p(body: Mapping[str, Any]) -> float:
    return number(body, "top_p", low=0.0, high=1.0, low_open=True) or 1.0


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An optional object; {} where absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"`{name}` must be an object, got {shown(value)}", param=name)
    return value


def stop_strings(value: Any, *, name: str = "stop") -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        raise RequestError(f"`{name}` must be a non-empty string or a list of up to {MAX_STOPS} of them", param=name)
    return tuple(stops)


def include_usage(body: Mapping[str, Any]) -> bool:
    """``stream_options.include_usage``."""
    return bool(mapping(body, "stream_options").get("include_usage"))


# --- tools ----------------------------------------------------------------------------------------


def chat_tools(value: Any) -> list[JsonObject] | None:
    """``tools`` in OpenAI's chat shape, each with a valid schema; None without any."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RequestError("`tools` must be a list", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(value):
        name = check_tool(tool, f"tools[{index}]")
        if name in seen:
            raise RequestError(f"`tools[{index}]` is another tool named {name!r}: names must be unique", param="tools")
        seen.add(name)
    return value


def flat_tools(value: Any, convert: Callable[[Any, str], JsonObject]) -> list[JsonObject] | None:
    """``tools`` of a flat shape as those of chat, ``convert`` taking one and its place; None without any."""
    if value is None:
        return None
    return chat_tools([convert(item, f"tools[{i}]") for i, item in enumerate(as_list(value, "tools"))])


def flat_function(
    tool: Mapping[str, Any],
    where: str,
    *,
    schema: str,
    needs_schema: bool,
    refused_unless: Mapping[str, Collection[Any]],
) -> JsonObject:
    """A tool that is a function itself, in the shape of chat; ``schema`` names the field of its parameters."""
    for name, allowed in refused_unless.items():
        if tool.get(name) not in allowed:
            raise UnsupportedField(f"`{where}.{name}` is not supported; leave it out", param=f"{where}.{name}")
    function: JsonObject = {"name": as_text(tool.get("name"), f"{where}.name", empty=False)}
    if tool.get("description") is not None:
        function["description"] = as_text(tool["description"], f"{where}.description")
    if needs_schema or tool.get(schema) is not None:
        function["parameters"] = check_schema(tool.get(schema), f"{where}.{schema}")
    if tool.get("strict") is not None:
        function["strict"] = flag(tool, "strict")
    return {"type": "function", "function": function}


def check_tool(tool: Any, where: str) -> str:
    """One tool in OpenAI's chat shape; returns its name."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise RequestError(f'`{where}` must be {{"type": "function", "function": {{...}}}}', param=where)
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"`{where}.function.name` must be a non-empty string", param=where)
    if function.get("parameters") is not None:
        check_schema(function["parameters"], f"{where}.function.parameters")
    return name


def check_schema(schema: Any, where: str) -> JsonObject:
    """An object that is a JSON schema.  Raises InvalidToolSchema."""
    try:
        fault = _schema_fault(orjson.dumps(schema))
    except orjson.JSONEncodeError:
        fault = "it is nested too deeply or holds numbers that JSON cannot"
    if fault:
        raise InvalidToolSchema(f"`{where}` is no JSON schema: {fault}", param=where)
    if not isinstance(schema, dict):
        raise InvalidToolSchema(f"`{where}` must be an object schema, got {shown(schema)}", param=where)
    return schema


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


def check_choice(choice: ToolChoice, tools: list[JsonObject] | None, *, param: str = "tool_choice") -> ToolChoice:
    """A choice that forces a call needs the tools that it speaks of."""
    if choice.mode != "required":
        return choice
    known = {tool["function"]["name"] for tool in tools or ()}
    if not known:
        raise RequestError(f"`{param}` forces a tool call, and `tools` is empty", param=param)
    for name in choice.names:
        if name not in known:
            raise RequestError(
                f"`{param}` names {name!r}, which is none of `tools`: {', '.join(sorted(known))}", param=param
            )
    return choice
