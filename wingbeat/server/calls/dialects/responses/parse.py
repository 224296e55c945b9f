"""A request of ``/v1/responses`` to a :class:`ModelCall`.

Every field that the API has is in exactly one of the tables below, which
``docs/reference/responses-fields.md`` publishes; a field in none of them is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from wingbeat.core.errors import RequestError, UnsupportedField
from wingbeat.server.calls.dialects import fields
from wingbeat.server.calls.dialects.blocks import as_list, as_object, as_text, shown, unsupported
from wingbeat.server.calls.dialects.responses.items import conversation
from wingbeat.server.calls.model_call import ChatPrompt, ModelCall, ToolChoice

HONOURED = frozenset(
    {"model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text"}
    | {"stream", "temperature", "top_p", "max_output_tokens", "top_logprobs", "include", "reasoning", "background"}
)
NO_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"prompt_cache_options", "stream_options", "max_tool_calls", "background_options"}
)
"""Accepted: they do not change what is sampled here."""
REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "conversation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "context_management": (None, []),
    "moderation": (None,),
    "access_programs": (None, {}),
    "image": (None, {}),
}
"""Refused by name unless they have one of these values, with which they say nothing."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDE = frozenset(
    {LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"}
    | {"message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"}
)
"""What may be asked for; all but the first two speak of things that never occur here."""

TOOL_REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (None, False),
    "async": (None, False),
    "allowed_callers": (None, ["direct"]),
    "output_schema": (None,),
}
"""Parts of a tool that would change the prompt or who may call it."""

ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "text": {"format": {"type": "text"}},
    "reasoning": None,
    "truncation": "disabled",
    "previous_response_id": None,
    "max_output_tokens": None,
    "top_logprobs": 0,
    "background": False,
    "user": None,
    "store": True,
}
"""Fields of a response that repeat the request, and what stands there where it has none."""


@dataclass(frozen=True, slots=True)
class ResponsesCall(ModelCall):
    """A call with what its response repeats."""

    echo: Mapping[str, orjson.Fragment] = field(default_factory=dict[str, orjson.Fragment])
    encrypted_reasoning: bool = False
    """Whether reasoning also comes in ``encrypted_content``, for clients that send only that back."""


def parse_responses_call(body: Any) -> ResponsesCall:
    """Raises RequestError (400) that names the field and the fix."""
    body = fields.body_object(body)
    fields.check_fields(body, honoured=HONOURED, no_effect=NO_EFFECT, refused_unless=REFUSED_UNLESS)
    policy, agent = fields.policy_and_agent(body)
    if fields.flag(body, "background"):
        raise UnsupportedField("`background` is not supported: wait for the answer, or stream it", param="background")
    _check_reasoning(body)
    included = _include(body.get("include"))
    tools = fields.flat_tools(body.get("tools"), _tool)
    parallel = body.get("parallel_tool_calls") is None or fields.flag(body, "parallel_tool_calls")
    if fields.integer(body, "top_logprobs", low=0, high=20):
        raise UnsupportedField(
            "`top_logprobs` is not supported: only the sampled token's logprob is kept; leave it out",
            param="top_logprobs",
        )
    return ResponsesCall(
        policy=policy,
        agent=agent,
        prompt=ChatPrompt(
            conversation(body.get("input")),
            previous_turn_id=_optional_text(body, "previous_response_id"),
            instructions=_optional_text(body, "instructions"),
        ),
        tools=tools,
        tool_choice=fields.check_choice(_tool_choice(body.get("tool_choice"), tools), tools),
        one_tool_call=not parallel,
        schema=_schema(body.get("text")),
        stream=fields.flag(body, "stream"),
        include_usage=True,
        temperature=fields.number(body, "temperature", low=0.0, high=10.0),
        top_p=fields.top_p(body),
        max_tokens=fields.integer(body, "max_output_tokens", low=1, high=fields.MAX_TOKENS),
        logprobs=LOGPROBS in included,
        echo=_echo(body),
        encrypted_reasoning=ENCRYPTED in included,
    )


def _echo(body: Mapping[str, Any]) -> dict[str, orjson.Fragment]:
    """What the response repeats, encoded now: what cannot be is refused before anything is sampled."""
    found: dict[str, orjson.Fragment] = {}
    for name, default in ECHOED.items():
        try:
            found[name] = orjson.Fragment(orjson.dumps(default if body.get(name) is None else body[name]))
        except orjson.JSONEncodeError as error:
            raise RequestError(f"`{name}` is nested too deeply or is no valid JSON: {error}", param=name) from error
    return found


def _optional_text(body: Mapping[str, Any], name: str) -> str:
    return "" if body.get(name) is None else as_text(body[name], name)


def _include(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset()
    names = as_list(value, "include")
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in INCLUDE:
            raise UnsupportedField(f"`include[{index}]` is {shown(name)}; leave it out", param="include")
    return frozenset(names)


def _check_reasoning(body: Mapping[str, Any]) -> None:
    """The whole reasoning always comes back, so ``summary`` has no effect; an effort would be a promise."""
    reasoning = fields.mapping(body, "reasoning")
    if reasoning.get("effort") is not None:
        raise UnsupportedField(
            "`reasoning.effort` would change what is sampled and is not supported; leave it out",
            param="reasoning.effort",
        )


def _tool(value: Any, where: str) -> dict[str, Any]:
    tool = as_object(value, where)
    if tool.get("type") != "function":
        raise unsupported(tool.get("type"), where, known=("function",))
    return fields.flat_function(
        tool, where, schema="parameters", needs_schema=False, refused_unless=TOOL_REFUSED_UNLESS
    )


def _tool_choice(value: Any, tools: list[dict[str, Any]] | None) -> ToolChoice:
    match value:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function"}:
            return ToolChoice("required", (_chosen(value, "tool_choice"),))
        case {"type": "allowed_tools"}:
            return _allowed_tools(value, tools)
        case {"type": kind}:
            raise unsupported(kind, "tool_choice", known=("allowed_tools", "function"))
        case _:
            raise RequestError(
                f"`tool_choice` must be auto, none, required or an object with a type, got {shown(value)}",
                param="tool_choice",
            )


def _chosen(value: Any, where: str) -> str:
    """The name of one function."""
    chosen = as_object(value, where)
    if chosen.get("type") != "function":
        raise unsupported(chosen.get("type"), where, known=("function",))
    return as_text(chosen.get("name"), f"{where}.name", empty=False)


def _allowed_tools(value: Mapping[str, Any], tools: list[dict[str, Any]] | None) -> ToolChoice:
    """Some of the tools; "auto" over a part of them would need a mask where no call is forced."""
    where = "tool_choice.tools"
    items = as_list(value.get("tools"), where)
    names = tuple(_chosen(item, f"{where}[{index}]") for index, item in enumerate(items))
    if value.get("mode") == "required" and names:
        return ToolChoice("required", names)
    if value.get("mode") == "auto" and {tool["function"]["name"] for tool in tools or ()} <= set(names):
        return ToolChoice()
    raise UnsupportedField(
        '`tool_choice.mode` must be "required" with one tool or more, or "auto" with all of them: with "auto", send'
        " only the tools that are allowed",
        param="tool_choice",
    )


def _schema(value: Any) -> dict[str, Any] | None:
    """The schema that the text must match; {} for any JSON object, None for free text."""
    if value is None:
        return None
    config = as_object(value, "text")
    for name in config.keys() - {"format", "verbosity"}:
        raise UnsupportedField(f"unknown field `text.{name}`; leave it out", param=f"text.{name}")
    if config.get("format") is None:
        return None
    wanted = as_object(config["format"], "text.format")
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return {}
        case "json_schema":
            return fields.check_schema(wanted.get("schema"), "text.format.schema")
        case kind:
            raise unsupported(kind, "text.format", known=("json_object", "json_schema", "text"))
